package kubernetes

import (
	"fmt"
	"slices"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/api/pod"
	"k8s.io/kubernetes/pkg/apis/admissionregistration"
	_ "k8s.io/kubernetes/pkg/apis/admissionregistration/install" // the defaults and conversions of the API server
	admissionregistrationvalidation "k8s.io/kubernetes/pkg/apis/admissionregistration/validation"
	"k8s.io/kubernetes/pkg/apis/apps"
	_ "k8s.io/kubernetes/pkg/apis/apps/install" // as above
	appsvalidation "k8s.io/kubernetes/pkg/apis/apps/validation"
	"k8s.io/kubernetes/pkg/apis/batch"
	_ "k8s.io/kubernetes/pkg/apis/batch/install" // as above
	batchvalidation "k8s.io/kubernetes/pkg/apis/batch/validation"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install" // as above
	corevalidation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/apis/networking"
	_ "k8s.io/kubernetes/pkg/apis/networking/install" // as above
	networkingvalidation "k8s.io/kubernetes/pkg/apis/networking/validation"
	"k8s.io/kubernetes/pkg/apis/rbac"
	_ "k8s.io/kubernetes/pkg/apis/rbac/install" // as above
	rbacvalidation "k8s.io/kubernetes/pkg/apis/rbac/validation"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install" // as above
	resourcevalidation "k8s.io/kubernetes/pkg/apis/resource/validation"
	"k8s.io/kubernetes/pkg/apis/storage"
	_ "k8s.io/kubernetes/pkg/apis/storage/install" // as above
	storagevalidation "k8s.io/kubernetes/pkg/apis/storage/validation"
	"k8s.io/kubernetes/pkg/capabilities"
)

func init() { // PodMonitor: a type of the Prometheus Operator's
	utilruntime.Must(monitoring.AddToScheme(legacyscheme.Scheme))
}

// strict refuses unknown and duplicate fields.
var strict = serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict).UniversalDeserializer()

// decode returns the objects of a file as API types.
func decode(t *testing.T, name, text string) []runtime.Object {
	t.Helper()
	var objects []runtime.Object
	for _, document := range documents(text) {
		object, _, err := strict.Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, document)
		}
		objects = append(objects, object)
	}
	return objects
}

// find returns the one object of a type.
func find[T runtime.Object](t *testing.T, objects []runtime.Object) T {
	t.Helper()
	var found []T
	for _, o := range objects {
		if o, ok := o.(T); ok {
			found = append(found, o)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d objects of type %T, want 1", len(found), *new(T))
	}
	return found[0]
}

func TestEveryObjectIsValidToTheAPI(t *testing.T) {
	// The setting of all servers that permit privileged pods.
	capabilities.Setup(true, 0)
	clusterWide := []string{"Namespace", "ClusterRole", "ClusterRoleBinding", "CSIDriver", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
	for name, text := range everything(t) {
		for _, object := range decode(t, name, text) {
			kind := object.GetObjectKind().GroupVersionKind().Kind
			if kind == monitoring.PodMonitorsKind {
				continue // its fields are checked; the server validates it by its schema only
			}
			legacyscheme.Scheme.Default(object)
			internal, err := legacyscheme.Scheme.ConvertToVersion(object, runtime.InternalGroupVersioner)
			if err != nil {
				t.Fatalf("%s: %s: %v", name, kind, err)
			}
			meta := internal.(metav1.Object)
			if meta.GetNamespace() == "" && !slices.Contains(clusterWide, kind) { // the client adds its own
				meta.SetNamespace("default")
			}
			for _, e := range validate(internal) {
				t.Errorf("%s: %s %s: %v", name, kind, meta.GetName(), e)
			}
		}
	}
}

// validate returns the errors of the API server.
func validate(object runtime.Object) field.ErrorList {
	switch o := object.(type) {
	case *admissionregistration.ValidatingAdmissionPolicy:
		return admissionregistrationvalidation.ValidateValidatingAdmissionPolicy(o)
	case *admissionregistration.ValidatingAdmissionPolicyBinding:
		return admissionregistrationvalidation.ValidateValidatingAdmissionPolicyBinding(o)
	case *apps.DaemonSet:
		return appsvalidation.ValidateDaemonSet(o, pod.GetValidationOptionsFromPodTemplate(&o.Spec.Template, nil))
	case *apps.Deployment:
		return appsvalidation.ValidateDeployment(o, pod.GetValidationOptionsFromPodTemplate(&o.Spec.Template, nil))
	case *batch.Job:
		// The server adds the selector of a job, so it is validated as a template.
		return batchvalidation.ValidateJobTemplateSpec(&batch.JobTemplateSpec{ObjectMeta: o.ObjectMeta, Spec: o.Spec}, nil,
			pod.GetValidationOptionsFromPodTemplate(&o.Spec.Template, nil))
	case *core.ConfigMap:
		return corevalidation.ValidateConfigMap(o)
	case *core.ServiceAccount:
		return corevalidation.ValidateServiceAccount(o)
	case *core.Namespace:
		return corevalidation.ValidateNamespace(o)
	case *networking.NetworkPolicy:
		return networkingvalidation.ValidateNetworkPolicy(o, networkingvalidation.NetworkPolicyValidationOptions{})
	case *rbac.ClusterRole:
		return rbacvalidation.ValidateClusterRole(o, rbacvalidation.ClusterRoleValidationOptions{})
	case *rbac.ClusterRoleBinding:
		return rbacvalidation.ValidateClusterRoleBinding(o)
	case *storage.CSIDriver:
		return storagevalidation.ValidateCSIDriver(o)
	case *resource.ResourceClaim:
		return resourcevalidation.ValidateResourceClaim(o)
	}
	return field.ErrorList{field.InternalError(nil, fmt.Errorf("no validation for %T", object))}
}
