// Package evidence is the common form of what a trial, a comparison or a simulation measured: a
// folder with a plan, raw samples and the environment. It summarizes samples, reaches a verdict by
// named profiles, and compares runs. It does not measure anything itself.
//
// Percentiles are by nearest rank over all repeats, with the number of samples beside them, and
// the spread of the repeats' own percentiles; intervals are bootstrapped with a fixed seed.
package evidence
