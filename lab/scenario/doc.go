// Package scenario is the versioned description of the work that shares GPUs: online services
// with their arrivals, and offline jobs. The simulator (internal/sim) runs a scenario in virtual
// time; gplab trial takes arrivals from it. The package has a library of scenarios: those of
// published papers, with their sources, and those of the design documents.
//
// All times are of virtual or wall-clock time and written as Go durations ("6ms"). Functions
// that draw random numbers take a seed and return the same for the same seed.
package scenario
