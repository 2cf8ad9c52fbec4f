package scenario

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// decode reads n into the value that into points to; fields have the names of their yaml tags.
// Errors are added to p.
func decode(p *yamlfile.Parser, n *yaml.Node, key string, into any) {
	if yamlfile.IsNull(n) {
		p.Fail(n, key, "has no value", "give one, or remove the key")
		return
	}
	switch v := into.(type) {
	case *string:
		p.Text(n, key, v)
		return
	case *int:
		if u, ok := p.Unsigned(n, key, math.MaxInt32); ok {
			*v = int(u)
		}
		return
	case *float64:
		p.Number(n, key, v)
		return
	case *time.Duration:
		p.Duration(n, key, v)
		return
	case *ArrivalKind:
		var word string
		if p.Word(n, key, kinds, &word) {
			*v = ArrivalKind(word)
		}
		return
	case *Service:
		v.Priority = int(gpreempt.PriorityHigh) // as an announcement that names none
	}
	switch v := reflect.ValueOf(into).Elem(); v.Kind() {
	case reflect.Struct:
		fields := map[string]reflect.Value{}
		var known []string
		for i := range v.NumField() {
			name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
			if name != "-" {
				fields[name] = v.Field(i)
				known = append(known, name)
			}
		}
		for _, e := range p.Mapping(n, key, known) {
			decode(p, e.Value, yamlfile.Join(key, e.Name), fields[e.Name].Addr().Interface())
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		decode(p, n, key, v.Interface())
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			p.Fail(n, key, "is "+yamlfile.Kind(n), "write a list, such as [0, 1] or lines that begin with a dash")
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		for i, item := range n.Content {
			at := fmt.Sprintf("%s[%d]", key, i)
			p.Set(at, item)
			decode(p, item, at, v.Index(i).Addr().Interface())
		}
	default:
		panic(fmt.Sprintf("scenario: %s is read into a %T", key, into))
	}
}
