package config

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"go.yaml.in/yaml/v3"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// value reads the value of key from n into the variable that into points to. Types are
// not converted: a number is not a text.
func (p *parser) value(n *yaml.Node, key string, into any) bool {
	switch list := into.(type) {
	case *[]string:
		if section(key) == "tcp" {
			return p.list(n, key, list, "write a list such as [dns:web.example], or remove the key: nobody", "write uri:URI, dns:NAME or cn:NAME")
		}
		return p.list(n, key, list, "write a list such as [gpreempt, 1001], [] for nobody, or remove the key to use the default", "write a name or a decimal id")
	case *Mechanisms:
		return p.list(n, key, (*[]string)(list), "write a list such as [dbgtrap, freezer], [] to suspend nothing, or remove the key to use the default", "write a name")
	}
	if yamlfile.IsNull(n) {
		p.Fail(n, key, "has no value", "give one, or remove the key to use the default")
		return false
	}
	var err error
	problem := "is " + yamlfile.Kind(n)
	var remedy string
	switch v := into.(type) {
	case *string:
		return p.Text(n, key, v)
	case *bool:
		return p.Bool(n, key, v)
	case *int:
		remedy = "write a whole number"
		if yamlfile.IsScalar(n, "!!int") {
			if *v, err = strconv.Atoi(n.Value); err == nil {
				return true
			}
			problem = yamlfile.Cut(n.Value) + " is not written in plain decimal digits"
		}
	case *float64:
		return p.Number(n, key, v)
	case *time.Duration:
		return p.Duration(n, key, v)
	case *gpreempt.Class:
		if *v, err = gpreempt.ParseClass(n.Value); err == nil && yamlfile.IsScalar(n, "!!str") {
			return true
		}
		return p.Word(n, key, api.EnumNames[gpreemptv1.Class](), new(string)) // fails
	case **gpreempt.Priority:
		if u, ok := p.Unsigned(n, key, uint64(gpreempt.MaxPriority)); ok {
			*v = new(gpreempt.Priority(u))
			return true
		}
		return false
	case **uint32:
		// The highest uid is -1, which no process has.
		if u, ok := p.Unsigned(n, key, math.MaxUint32-1); ok {
			*v = new(uint32(u))
			return true
		}
		return false
	default:
		panic(fmt.Sprintf("config: %s is read into a %T", key, into))
	}
	p.Fail(n, key, problem, remedy)
	return false
}

// list reads names and decimal ids.
func (p *parser) list(n *yaml.Node, key string, into *[]string, notList, notItem string) bool {
	items, ok := p.Items(n, key, notList, notItem)
	if n.Kind != yaml.SequenceNode {
		return false
	}
	var names []string
	for _, item := range items {
		names = append(names, item.Value)
	}
	*into = names
	return ok
}
