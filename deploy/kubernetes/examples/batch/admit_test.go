package batch

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"
	qcache "sigs.k8s.io/kueue/pkg/cache/queue"
	schdcache "sigs.k8s.io/kueue/pkg/cache/scheduler"
	"sigs.k8s.io/kueue/pkg/controller/jobframework"
	"sigs.k8s.io/kueue/pkg/controller/jobs/job"
	"sigs.k8s.io/kueue/pkg/scheduler"
	preemptexpectations "sigs.k8s.io/kueue/pkg/scheduler/preemption/expectations"
	utiltesting "sigs.k8s.io/kueue/pkg/util/testing"
	"sigs.k8s.io/kueue/pkg/workload"
)

// manager is Kueue's reconciler of jobs and its scheduler, on an API without a server.
type manager struct {
	api        client.Client
	cache      *schdcache.Cache
	queues     *qcache.Manager
	reconciler jobframework.JobReconcilerInterface
	// changed receives something when the status of a workload was written.
	changed chan struct{}
}

// newManager returns Kueue with the queues of the examples.
func newManager(t *testing.T) *manager {
	t.Helper()
	m := &manager{changed: make(chan struct{}, 1)}
	ctx := t.Context()
	builder := utiltesting.NewClientBuilder().WithStatusSubresource(&kueue.Workload{}).WithInterceptorFuncs(interceptor.Funcs{
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, o client.Object, p client.Patch, options ...client.SubResourcePatchOption) error {
			err := utiltesting.TreatSSAAsStrategicMerge(ctx, c, sub, o, p, options...)
			select {
			case m.changed <- struct{}{}:
			default:
			}
			return err
		},
	})
	indexer := utiltesting.AsIndexer(builder)
	if err := job.SetupIndexes(ctx, indexer); err != nil {
		t.Fatal(err)
	}
	for _, o := range examples(t) {
		if _, isJob := o.(*batchv1.Job); !isJob {
			builder = builder.WithObjects(o)
		}
	}
	m.api = builder.Build()
	m.cache = schdcache.New(m.api)
	preemptions := preemptexpectations.New()
	m.queues = qcache.NewManagerForUnitTests(m.api, m.cache, qcache.WithPreemptionExpectations(preemptions))
	m.cache.AddOrUpdateResourceFlavor(ctrl.Log, the[*kueue.ResourceFlavor](t))
	queue := the[*kueue.ClusterQueue](t)
	if err := m.cache.AddClusterQueue(ctx, queue); err != nil {
		t.Fatal(err)
	}
	if err := m.queues.AddClusterQueue(ctx, queue); err != nil {
		t.Fatal(err)
	}
	if err := m.queues.AddLocalQueue(ctx, the[*kueue.LocalQueue](t)); err != nil {
		t.Fatal(err)
	}
	recorder := &utiltesting.EventRecorder{}
	var err error
	if m.reconciler, err = job.NewReconciler(ctx, m.api, indexer, recorder, jobframework.WithCache(m.cache), jobframework.WithQueues(m.queues)); err != nil {
		t.Fatal(err)
	}
	if err := scheduler.New(m.queues, m.cache, m.api, recorder, scheduler.WithPreemptionExpectations(preemptions)).Start(ctx); err != nil {
		t.Fatal(err)
	}
	return m
}

// submit creates a job and returns its workload, which is in Kueue's queue.
func (m *manager) submit(t *testing.T, j *batchv1.Job) *kueue.Workload {
	t.Helper()
	one := int32(1)
	j.Spec.Parallelism, j.Spec.Completions = &one, &one // the API server's defaults
	if err := m.api.Create(t.Context(), j); err != nil {
		t.Fatal(err)
	}
	m.reconcile(t, j)
	var all kueue.WorkloadList
	if err := m.api.List(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	for i := range all.Items {
		if all.Items[i].OwnerReferences[0].Name == j.Name {
			if err := m.queues.AddOrUpdateWorkload(ctrl.Log, all.Items[i].DeepCopy()); err != nil {
				t.Fatal(err)
			}
			return &all.Items[i]
		}
	}
	t.Fatalf("job %s has no workload", j.Name)
	return nil
}

// reconcile has Kueue look at a job, and reads it again.
func (m *manager) reconcile(t *testing.T, j *batchv1.Job) {
	t.Helper()
	key := client.ObjectKeyFromObject(j)
	if _, err := m.reconciler.Reconcile(t.Context(), ctrl.Request{NamespacedName: key}); err != nil {
		t.Fatal(err)
	}
	if err := m.api.Get(t.Context(), key, j); err != nil {
		t.Fatal(err)
	}
}

// decided waits until Kueue has decided about a workload, and reports whether it has a quota.
func (m *manager) decided(t *testing.T, w *kueue.Workload) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		if err := m.api.Get(ctx, client.ObjectKeyFromObject(w), w); err != nil {
			t.Fatal(err)
		}
		if len(w.Status.Conditions) > 0 {
			return workload.HasQuotaReservation(w)
		}
		select {
		case <-m.changed:
		case <-ctx.Done():
			t.Fatalf("no decision about %s", w.Name)
		}
	}
}

func TestKueueStartsAnOfflineJobOnNodesThatCanSuspendIt(t *testing.T) {
	m := newManager(t)
	j := the[*batchv1.Job](t)
	w := m.submit(t, j)
	if !m.decided(t, w) {
		t.Fatalf("the job has no quota: %v", w.Status.Conditions)
	}
	m.reconcile(t, j)
	type started struct {
		Suspended bool
		Nodes     map[string]string
	}
	want := started{Suspended: false, Nodes: map[string]string{"gpreempt/mechanism": "dbgtrap"}}
	if diff := cmp.Diff(want, started{*j.Spec.Suspend, j.Spec.Template.Spec.NodeSelector}); diff != "" {
		t.Errorf("job (-want +got):\n%s", diff)
	}
}

func TestKueueAdmitsAsManyJobsAsThereIsRoomForOfflinePods(t *testing.T) {
	m := newManager(t)
	quota := the[*kueue.ClusterQueue](t).Spec.ResourceGroups[0].Flavors[0].Resources[0].NominalQuota.Value()
	var admitted int64
	for i := range quota + 1 {
		j := the[*batchv1.Job](t)
		j.Name = fmt.Sprintf("training-%d", i)
		j.UID = types.UID(j.Name)
		for name, value := range map[corev1.ResourceName]string{"cpu": "1", "memory": "1Gi"} { // not what limits them
			j.Spec.Template.Spec.Containers[0].Resources.Requests[name] = resource.MustParse(value)
		}
		if m.decided(t, m.submit(t, j)) {
			admitted++
		}
	}
	if admitted != quota {
		t.Errorf("%d jobs are admitted, want %d", admitted, quota)
	}
}
