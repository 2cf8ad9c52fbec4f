// Command gpctl shows and steers gpreemptd.
package main

import (
	"context"
	"os"

	"github.com/gpreempt/gpreempt/internal/cli"
)

func main() {
	os.Exit(cli.Program.Main(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Getenv))
}
