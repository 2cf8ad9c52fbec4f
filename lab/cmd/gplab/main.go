// Command gplab measures what gpreempt does to given work, and decodes what drivers and runtimes
// wrote.
package main

import (
	"context"
	"os"

	"github.com/gpreempt/gpreempt/lab/cli"
)

func main() {
	os.Exit(cli.Program.Main(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Getenv))
}
