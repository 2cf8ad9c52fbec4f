package scheduler

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// TestRunnerUnderLoad lets clients, an admin and a discovery that changes its mind
// work at the same time; every announcement gets its one answer, and in the end
// everything runs.
func TestRunnerUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.running(t)
		m.SetLimits(Limits{LeasesPerClient: 1000, LeasesPerUser: 1000, LeasesTotal: 1000})
		for id := range gpreempt.GPUID(4) {
			m.Post(GPUAdded{GPU: id + 1})
		}
		check := func() {
			m.View(func(c *Core) {
				if err := c.CheckInvariants(); err != nil {
					t.Error(err)
				}
			})
		}
		var work sync.WaitGroup
		var mu sync.Mutex
		answers, announced := map[LeaseID]int{}, 0
		for client := range int32(8) {
			work.Go(func() {
				roll := rand.New(rand.NewPCG(uint64(client), 1)).IntN
				for range 100 {
					req := request()
					req.Client = ClientID{PID: client + 1}
					req.GPUs = []gpreempt.GPUID{gpreempt.GPUID(1 + roll(4))}
					req.TTL = time.Millisecond * time.Duration(1+roll(20))
					req.MaxWait = time.Millisecond * time.Duration(roll(3))
					id, _, err := m.Announce(req, func(id LeaseID, _ Answer) {
						mu.Lock()
						defer mu.Unlock()
						answers[id]++
					})
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					announced++
					mu.Unlock()
					time.Sleep(time.Microsecond * time.Duration(roll(3000)))
					switch roll(4) {
					case 0:
						_, err = m.Renew(req.Client, id, time.Millisecond)
						if err != nil && gpreempt.ReasonOf(err) != gpreempt.ReasonUnknownLease {
							t.Error(err)
						}
					case 1:
						m.Post(ClientGone{req.Client, EndClientDied})
					default:
						if _, _, err := m.Complete(req.Client, id, EndCompleted); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
		for i := range 4 {
			work.Go(func() {
				roll := rand.New(rand.NewPCG(uint64(100+i), 1)).IntN
				for range 100 {
					key := gpreempt.ProcessKey{PID: int32(100 + roll(12)), Start: 1}
					switch roll(6) {
					case 0:
						m.Post(TargetGone{key})
					case 1:
						m.Post(Pin{key, CauseHold, time.Millisecond})
					default:
						m.Post(TargetSeen{
							Target: key, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{gpreempt.GPUID(1 + roll(4))}, Queues: uint64(roll(3)),
						})
					}
					time.Sleep(time.Microsecond * time.Duration(roll(3000)))
					check()
				}
			})
		}
		work.Wait()
		m.Stop()
		time.Sleep(time.Minute)
		check()
		for id, n := range answers {
			if n != 1 {
				t.Errorf("lease %d got %d answers", id, n)
			}
		}
		if len(answers) != announced || announced != 800 {
			t.Errorf("%d announcements of 800, %d answered", announced, len(answers))
		}
		m.View(func(c *Core) {
			if n := c.Away(); n != 0 {
				t.Errorf("stopped, and %d targets are away", n)
			}
			if n := len(c.Leases()); n != 0 {
				t.Errorf("%d leases live on", n)
			}
		})
	})
}
