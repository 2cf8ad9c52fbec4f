package conformance

import (
	"maps"
	"strings"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The verbs about memory that CPU and GPU share (SVM). Without "at", svm_set and svm_get are
// about page "page", 0 if not given, of sharedPages that the process has mapped.

const sharedPages = 16

func init() {
	maps.Copy(verbs, map[string]func(*doing) (int64, error){
		"svm_set": svmSet, "svm_get": svmGet,
		// renew unmaps some of the pages, and maps other memory in their place.
		"renew": func(d *doing) (int64, error) {
			at, err := d.shared()
			if err != nil {
				return 0, err
			}
			return 0, d.sys.program().renew(at+pageSize*d.num("page", 0), d.num("size", pageSize))
		},
	})
}

// svmCall is a call with its attributes.
type svmCall struct {
	kfdabi.SVMArgs
	Attrs [8]kfdabi.SVMAttribute
}

func (d *doing) svm(op uint32, attrs []kfdabi.SVMAttribute) ([]kfdabi.SVMAttribute, int64, error) {
	c := svmCall{SVMArgs: kfdabi.SVMArgs{StartAddr: d.num("at", 0), Size: d.num("size", pageSize), Op: uint32(d.num("op", uint64(op))), NumAttrs: uint32(len(attrs))}}
	if _, given := d.values["at"]; !given {
		at, err := d.shared()
		if err != nil {
			return nil, 0, err
		}
		c.StartAddr = at + pageSize*d.num("page", 0)
	}
	copy(c.Attrs[:], attrs)
	const header, attribute = 24, 8
	r, err := d.ioctl(kfdabi.ReqSVM&0xc000ffff|kfd.Request(header+attribute*len(attrs))<<16, kfd.PointerTo(&c))
	return c.Attrs[:len(attrs)], r, err
}

// shared returns the address of the process's pages for these verbs.
func (d *doing) shared() (uint64, error) {
	p := d.sys.program()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shared == 0 {
		at, err := p.reserve(sharedPages * pageSize)
		if err != nil {
			return 0, err
		}
		p.shared = at
	}
	return p.shared, nil
}

// svmAttrs are the attributes by their names, in the order of a call.
var svmAttrs = []struct {
	name string
	kind uint32
}{
	{"preferred", kfdabi.SVMAttrPreferredLoc},
	{"prefetch", kfdabi.SVMAttrPrefetchLoc},
	{"access", kfdabi.SVMAttrAccess},
	{"inplace", kfdabi.SVMAttrAccessInPlace},
	{"none", kfdabi.SVMAttrNoAccess},
	{"set", kfdabi.SVMAttrSetFlags},
	{"clr", kfdabi.SVMAttrClrFlags},
	{"granularity", kfdabi.SVMAttrGranularity},
}

// svmSet sets the attributes that the line names. "kind" is a number of another.
func svmSet(d *doing) (int64, error) {
	var attrs []kfdabi.SVMAttribute
	for _, a := range svmAttrs {
		if _, given := d.values[a.name]; given {
			attrs = append(attrs, kfdabi.SVMAttribute{Type: a.kind, Value: uint32(d.num(a.name, 0))})
		}
	}
	if _, given := d.values["kind"]; given {
		attrs = append(attrs, kfdabi.SVMAttribute{Type: uint32(d.num("kind", 0))})
	}
	_, r, err := d.svm(kfdabi.SVMOpSetAttr, attrs)
	return r, err
}

// svmGet returns the attributes in "what", joined by "+". For "access" the line names a GPU,
// and the answer is access, inplace or none.
func svmGet(d *doing) (int64, error) {
	var attrs []kfdabi.SVMAttribute
	what := d.text("what", "granularity")
	for _, a := range svmAttrs {
		if strings.Contains("+"+what+"+", "+"+a.name+"+") {
			attrs = append(attrs, kfdabi.SVMAttribute{Type: a.kind, Value: uint32(d.num(a.name, 0))})
		}
	}
	attrs, r, err := d.svm(kfdabi.SVMOpGetAttr, attrs)
	for _, got := range attrs {
		for _, a := range svmAttrs {
			switch {
			case a.kind != got.Type:
			case a.name == "access" || a.name == "inplace" || a.name == "none":
				d.out("access", a.name)
			default:
				d.out(a.name, got.Value)
			}
		}
	}
	return r, err
}
