// Command node is what the nodes and pods of the test cluster need and nobody publishes here: the
// sandbox's first process, a server that announces its work, and the runtime that gives
// containers the emulated machine.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

func main() {
	var err error
	switch name := filepath.Base(os.Args[0]); {
	case name == "runc":
		err = runtime(os.Args)
	case len(os.Args) > 1 && os.Args[1] == "pause":
		// Process 1 of the sandbox keeps its namespaces.
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
		<-stop
	case len(os.Args) > 1 && os.Args[1] == "chat":
		err = chat(os.Args[2:])
	default:
		err = fmt.Errorf("%q is no program of it: pause, chat, or runc as its name", name)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "node:", err)
		os.Exit(1)
	}
}
