package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// value reads the value of key from n into the variable at into, whose type says
// what is wanted. Types are not bent: a number is no text, a text no number.
func (p *parser) value(n *yaml.Node, key string, into any) bool {
	switch list := into.(type) {
	case *[]string:
		if key == "containers.sockets" {
			good := p.list(n, key, list, "write a list such as [/run/docker.sock], [] to ask no runtime, or remove the key to have the default", "write a path")
			if *list == nil {
				*list = []string{} // nil could be taken for the default
			}
			return good
		}
		if section(key) == "tcp" {
			return p.list(n, key, list, "write a list such as [dns:web.example], or remove the key: nobody", "write uri:URI, dns:NAME or cn:NAME")
		}
		return p.list(n, key, list, "write a list such as [gpreempt, 1001], [] for nobody, or remove the key to have the default", "write a name or a decimal id")
	case *Mechanisms:
		return p.list(n, key, (*[]string)(list), "write a list such as [dbgtrap, freezer], [] to suspend nothing, or remove the key to have the default", "write a name")
	}
	if isNull(n) {
		p.fail(n, key, "has no value", "give one, or remove the key to have the default")
		return false
	}
	var err error
	problem := "is " + kindOf(n)
	var remedy string
	switch v := into.(type) {
	case *string:
		remedy = "write a text; put it in quotes if it looks like a number"
		if isScalar(n, "!!str") {
			*v = n.Value
			return true
		}
	case *int:
		remedy = "write a whole number"
		if isScalar(n, "!!int") {
			if *v, err = strconv.Atoi(n.Value); err == nil {
				return true
			}
			problem = cut(n.Value) + " is not written in plain decimal digits"
		}
	case *float64:
		remedy = "write a number such as 0.25"
		if isScalar(n, "!!float") || isScalar(n, "!!int") {
			if *v, err = strconv.ParseFloat(n.Value, 64); err == nil {
				return true
			}
			problem = cut(n.Value) + " is not a number a policy can use"
		}
	case *bool:
		remedy = "write true or false"
		if isScalar(n, "!!bool") {
			*v = n.Value == "true"
			if *v || n.Value == "false" {
				return true
			}
			problem = "is spelled " + quoted(n.Value)
		}
	case *time.Duration:
		remedy = "write a number with its unit, such as 20ms, 1.5s or 1m"
		if isScalar(n, "!!str") || n.Value == "0" {
			if *v, err = time.ParseDuration(n.Value); err == nil {
				return true
			}
			problem = quoted(n.Value) + " is not a duration"
		} else if isScalar(n, "!!int") || isScalar(n, "!!float") {
			problem = cut(n.Value) + " has no unit"
		}
	case *scheduler.SuspendWhen:
		return readWord(p, n, key, v, api.EnumNames[gpreemptv1.SuspendWhen](), func(s string) (scheduler.SuspendWhen, error) {
			w, err := api.ParseEnum[gpreemptv1.SuspendWhen](s)
			return scheduler.SuspendWhen(w), err
		})
	case *scheduler.Linger:
		return readWord(p, n, key, v, api.EnumNames[gpreemptv1.Linger](), func(s string) (scheduler.Linger, error) {
			w, err := api.ParseEnum[gpreemptv1.Linger](s)
			return scheduler.Linger(w), err
		})
	case *scheduler.GangScope:
		return readWord(p, n, key, v, api.EnumNames[gpreemptv1.GangScope](), func(s string) (scheduler.GangScope, error) {
			w, err := api.ParseEnum[gpreemptv1.GangScope](s)
			return scheduler.GangScope(w), err
		})
	case *gpreempt.Class:
		return readWord(p, n, key, v, api.EnumNames[gpreemptv1.Class](), gpreempt.ParseClass)
	case **gpreempt.Priority:
		if u, ok := p.unsigned(n, key, uint64(gpreempt.MaxPriority)); ok {
			*v = new(gpreempt.Priority(u))
			return true
		}
		return false
	case **uint32:
		// The highest uid is -1, which is nobody.
		if u, ok := p.unsigned(n, key, math.MaxUint32-1); ok {
			*v = new(uint32(u))
			return true
		}
		return false
	default:
		panic(fmt.Sprintf("config: %s is read into a %T", key, into))
	}
	p.fail(n, key, problem, remedy)
	return false
}

func readWord[T any](p *parser, n *yaml.Node, key string, into *T, all []string, parse func(string) (T, error)) bool {
	choices := "write " + strings.Join(all[:len(all)-1], ", ") + " or " + all[len(all)-1]
	if !isScalar(n, "!!str") {
		p.fail(n, key, "is "+kindOf(n), choices)
		return false
	}
	v, err := parse(n.Value)
	if err != nil {
		p.fail(n, key, quoted(n.Value)+" is not known here", choices)
		return false
	}
	*into = v
	return true
}

func (p *parser) unsigned(n *yaml.Node, key string, most uint64) (uint64, bool) {
	remedy := fmt.Sprintf("write a whole number from 0 to %d", most)
	if !isScalar(n, "!!int") {
		p.fail(n, key, "is "+kindOf(n), remedy)
		return 0, false
	}
	u, err := strconv.ParseUint(n.Value, 10, 64)
	if err != nil || u > most {
		p.fail(n, key, fmt.Sprintf("%s is outside 0 to %d", cut(n.Value), most), remedy)
		return 0, false
	}
	return u, true
}

// list reads names and decimal ids. The remedies are for what is no list, and for
// what is none of those.
func (p *parser) list(n *yaml.Node, key string, into *[]string, noList, noItem string) bool {
	if n.Kind != yaml.SequenceNode {
		problem := "is " + kindOf(n)
		if isNull(n) {
			problem = "has no value"
		}
		p.fail(n, key, problem, noList)
		return false
	}
	var names []string
	good := true
	for i, item := range n.Content {
		p.nodes[fmt.Sprintf("%s[%d]", key, i)] = item
		if !isScalar(item, "!!str") && !isScalar(item, "!!int") {
			p.fail(item, key, "an item is "+kindOf(item), noItem)
			good = false
			continue
		}
		names = append(names, item.Value)
	}
	*into = names
	return good
}

func isScalar(n *yaml.Node, tag string) bool {
	return n.Kind == yaml.ScalarNode && n.ShortTag() == tag
}

func isNull(n *yaml.Node) bool { return isScalar(n, "!!null") }

// kindOf says what n is, after "is".
func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias (*" + cut(n.Value) + "), which this file does not use"
	default:
	}
	switch tag := n.ShortTag(); tag {
	case "!!str":
		return "the text " + quoted(n.Value)
	case "!!int", "!!float":
		return "the number " + cut(n.Value)
	case "!!bool":
		return "the truth value " + cut(n.Value)
	case "!!null":
		return "empty"
	case "!!timestamp":
		return "the date " + cut(n.Value)
	default:
		return "of the type " + cut(tag) + ", which this file does not use"
	}
}

// quoted and cut keep what a file says short and printable in an error.
func quoted(s string) string { return strconv.Quote(shorten(s)) }

func cut(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, shorten(s))
}

func shorten(s string) string {
	const most = 60
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "..."
	}
	return s
}
