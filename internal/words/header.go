package words

// SimulatedHeader names the header by which the daemon tells admins, with every
// answer, that no hardware is involved: its value is the name of the backend.
const SimulatedHeader = "gpreempt-simulated"
