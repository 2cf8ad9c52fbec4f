package accept

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Command returns the command of gpaccept. Its help is also its manual page.
func Command() *cobra.Command {
	var (
		gpu  uint32
		cfg  Config
		soak time.Duration
	)
	cmd := &cobra.Command{
		Use:           "gpaccept --gpu ID --out FILE",
		Short:         "Test on this host whether a GPU can be preempted, and write a report",
		Version:       api.VersionString(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Long: `Test on this host whether a GPU can be preempted, and write a report. The tests suspend
processes of this program in every way that gpreemptd does, from harmless to harsh.
They may hang a GPU, reset it, and lose the work on every GPU of the host. So the command
refuses to begin while any other process uses the GPU driver, and it stops at the first
stage that fails and at the first alarm in the kernel log.

The report is an archive with the result of each stage, its criteria, the raw samples, what
identifies the host, and the sums of all files. It is complete on the disk before each stage
begins, so that it outlives a reset of the host. Stages that did not run are in it, with the
reason. The exit code is 0 if no stage failed.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.GPU, cfg.Soak = gpreempt.GPUID(gpu), soak
			cfg.Root, cfg.KernelLog = discovery.Host("/"), "/dev/kmsg"
			cfg.Version, cfg.Log = api.VersionString(), cmd.OutOrStdout()
			if !cmd.Flags().Changed("seed") {
				cfg.Seed = rand.Uint64() //nolint:gosec // G404: test data need no secrecy; the report names the seed
			}
			verdict, err := Run(cmd.Context(), cfg)
			if err == nil && verdict != Pass && verdict != Emulated {
				err = fmt.Errorf("the verdict is %s: see report.txt in %s", verdict, cfg.Out)
			}
			return err
		},
	}
	cmd.SetVersionTemplate("gpaccept {{.Version}}\n")
	flags := cmd.Flags()
	flags.Uint32Var(&gpu, "gpu", 0, "the KFD gpu_id, as in /sys/class/kfd/kfd/topology/nodes/*/gpu_id")
	flags.StringVar(&cfg.Out, "out", "", "the report: a new file, a compressed tar archive")
	flags.BoolVar(&cfg.Quick, "quick", false, "make a hundredth of the cycles")
	flags.DurationVar(&soak, "soak", 0, "how long the last stage repeats cycles; 0 leaves it out")
	flags.Uint64Var(&cfg.Seed, "seed", 0, "the seed of all data, instead of a random one")
	for _, name := range []string{"gpu", "out"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // there is such a flag
		}
	}
	return cmd
}
