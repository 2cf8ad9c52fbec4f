// Package batch tests the examples for batch queues against Kueue's own code: its types, schemas, webhooks, reconciler of
// jobs and scheduler. There is no API server and no node.
package batch

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	crdvalidation "k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"sigs.k8s.io/controller-runtime/pkg/client"
	configapi "sigs.k8s.io/kueue/apis/config/v1beta2"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"
	"sigs.k8s.io/kueue/pkg/config"
	"sigs.k8s.io/kueue/pkg/webhooks"
	"sigs.k8s.io/yaml"
)

// scheme has the types of the examples.
var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{kueue.AddToScheme, batchv1.AddToScheme, corev1.AddToScheme} {
		utilruntime.Must(add(s))
	}
	return s
}()

// documents returns the YAML documents of a file.
func documents(t *testing.T, path string) (all [][]byte) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		all = append(all, document)
	}
}

// examples returns the objects of the examples. Unknown and duplicate fields are errors.
func examples(t *testing.T) (all []client.Object) {
	t.Helper()
	strict := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for _, path := range []string{"kueue.yaml", "job.yaml"} {
		for _, document := range documents(t, path) {
			object, _, err := strict.Decode(document, nil, nil)
			if err != nil {
				t.Fatalf("%s: %v\n%s", path, err, document)
			}
			all = append(all, object.(client.Object))
		}
	}
	return all
}

// the returns the one example of a type.
func the[T client.Object](t *testing.T) T {
	t.Helper()
	var found []T
	for _, o := range examples(t) {
		if o, ok := o.(T); ok {
			found = append(found, o)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d objects of type %T, want 1", len(found), *new(T))
	}
	return found[0]
}

func TestObjectsAreValidToKueue(t *testing.T) {
	schemas := schemas(t)
	for _, object := range examples(t) {
		kind := object.GetObjectKind().GroupVersionKind().Kind
		if s, isKueue := schemas[kind]; isKueue {
			for _, e := range s.validate(t, object) {
				t.Errorf("%s %s: %v", kind, object.GetName(), e)
			}
		}
		var err error
		switch o := object.(type) {
		case *kueue.ClusterQueue:
			err = webhooks.ValidateClusterQueue(o).ToAggregate()
		case *kueue.ResourceFlavor:
			err = webhooks.ValidateResourceFlavor(o).ToAggregate()
		}
		if err != nil {
			t.Errorf("%s %s: %v", kind, object.GetName(), err)
		}
	}
}

// schema is the schema of a type of Kueue's, as the API server uses it.
type schema struct {
	structural *structuralschema.Structural
	fields     crdvalidation.SchemaValidator
	rules      *cel.Validator
}

// schemas returns the schemas of the version of the examples in Kueue's module, by kind.
func schemas(t *testing.T) map[string]schema {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(kueueModule(t), "config/components/crd/bases/*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d schemas, %v", len(files), err)
	}
	all := map[string]schema{}
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &crd); err != nil {
			t.Fatal(err)
		}
		for _, version := range crd.Spec.Versions {
			if version.Name != kueue.GroupVersion.Version {
				continue
			}
			var internal apiextensions.CustomResourceValidation
			if err := apiextensionsv1.Convert_v1_CustomResourceValidation_To_apiextensions_CustomResourceValidation(version.Schema, &internal, nil); err != nil {
				t.Fatal(err)
			}
			structural, err := structuralschema.NewStructural(internal.OpenAPIV3Schema)
			if err != nil {
				t.Fatal(err)
			}
			fields, _, err := crdvalidation.NewSchemaValidator(internal.OpenAPIV3Schema)
			if err != nil {
				t.Fatal(err)
			}
			all[crd.Spec.Names.Kind] = schema{structural, fields, cel.NewValidator(structural, true, celconfig.PerCallLimit)}
		}
	}
	return all
}

// validate returns the errors of the API server, after it has set defaults.
func (s schema) validate(t *testing.T, object client.Object) field.ErrorList {
	t.Helper()
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		t.Fatal(err)
	}
	delete(content, "status") // as on creation: the server drops it
	defaulting.Default(content, s.structural)
	errs := crdvalidation.ValidateCustomResource(nil, content, s.fields)
	more, _ := s.rules.Validate(t.Context(), nil, s.structural, content, nil, celconfig.RuntimeCELCostBudget)
	return append(errs, more...)
}

// kueueModule returns the directory of Kueue's module.
func kueueModule(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kueue").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func TestKueueAcceptsTheConfiguration(t *testing.T) {
	s := runtime.NewScheme()
	utilruntime.Must(configapi.AddToScheme(s))
	if _, _, err := config.Load(s, "kueue-config.yaml"); err != nil {
		t.Fatal(err)
	}
}

func TestTheQueuesLeadFromTheJobToTheNodes(t *testing.T) {
	job, local, queue, flavor, namespace := the[*batchv1.Job](t), the[*kueue.LocalQueue](t), the[*kueue.ClusterQueue](t), the[*kueue.ResourceFlavor](t), the[*corev1.Namespace](t)
	type path struct {
		Namespace, LocalQueue, ClusterQueue, Flavor string
		Selected                                    bool
	}
	selector, err := metav1.LabelSelectorAsSelector(queue.Spec.NamespaceSelector)
	if err != nil {
		t.Fatal(err)
	}
	want := path{job.Namespace, job.Labels["kueue.x-k8s.io/queue-name"], string(local.Spec.ClusterQueue), string(queue.Spec.ResourceGroups[0].Flavors[0].Name), true}
	got := path{local.Namespace, local.Name, queue.Name, flavor.Name, local.Namespace == namespace.Name && selector.Matches(labels.Set(namespace.Labels))}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
}

// The times of docs/kubernetes.md for the default policy.
func TestTheJobOutlastsTheSuspensionsOfTheDefaultPolicy(t *testing.T) {
	const (
		maxSuspend = 10 * time.Second // the defaults of policy.max_suspend and policy.share_floor
		shareFloor = 0.1
	)
	j := the[*batchv1.Job](t)
	c := j.Spec.Template.Spec.Containers[0]
	for name, probe := range map[string]*corev1.Probe{"liveness": c.LivenessProbe, "startup": c.StartupProbe} {
		// The first failure is the one after which the others count.
		if window := time.Duration(probe.PeriodSeconds*(probe.FailureThreshold-1)) * time.Second; window < 2*maxSuspend {
			t.Errorf("the %s probe ends the container after %v, within 2 × max_suspend", name, window)
		}
	}
	if work := time.Duration(float64(*j.Spec.ActiveDeadlineSeconds)*shareFloor) * time.Second; work < 4*time.Hour {
		t.Errorf("the deadline leaves %v of work at the share floor, want the 4 h of the comment", work)
	}
	if c.ReadinessProbe != nil {
		t.Error("a readiness probe would have Kueue's recoveryTimeout run while the freezer holds the job")
	}
}
