package yamlfile

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// textRemedy is the remedy for a value that is not a text.
const textRemedy = "write a text; put it in quotes if it looks like a number"

// Text reads a text.
func (p *Parser) Text(n *yaml.Node, key string, into *string) bool {
	if !IsScalar(n, "!!str") {
		p.Fail(n, key, "is "+Kind(n), textRemedy)
		return false
	}
	*into = n.Value
	return true
}

// Bool reads true or false.
func (p *Parser) Bool(n *yaml.Node, key string, into *bool) bool {
	problem := "is " + Kind(n)
	if IsScalar(n, "!!bool") {
		*into = n.Value == "true"
		if *into || n.Value == "false" {
			return true
		}
		problem = "is spelled " + Quoted(n.Value)
	}
	p.Fail(n, key, problem, "write true or false")
	return false
}

// Unsigned reads a whole number from 0 to most.
func (p *Parser) Unsigned(n *yaml.Node, key string, most uint64) (uint64, bool) {
	remedy := fmt.Sprintf("write a whole number from 0 to %d", most)
	if !IsScalar(n, "!!int") {
		p.Fail(n, key, "is "+Kind(n), remedy)
		return 0, false
	}
	u, err := strconv.ParseUint(n.Value, 10, 64)
	if err != nil || u > most {
		p.Fail(n, key, fmt.Sprintf("%s is outside 0 to %d", Cut(n.Value), most), remedy)
		return 0, false
	}
	return u, true
}

// Number reads a number.
func (p *Parser) Number(n *yaml.Node, key string, into *float64) bool {
	problem := "is " + Kind(n)
	if IsScalar(n, "!!float") || IsScalar(n, "!!int") {
		v, err := strconv.ParseFloat(n.Value, 64)
		if err == nil {
			*into = v
			return true
		}
		problem = Cut(n.Value) + " is not a decimal number"
	}
	p.Fail(n, key, problem, "write a number such as 0.25")
	return false
}

// Duration reads a duration with its unit, or 0.
func (p *Parser) Duration(n *yaml.Node, key string, into *time.Duration) bool {
	problem := "is " + Kind(n)
	if IsScalar(n, "!!str") || n.Value == "0" {
		d, err := time.ParseDuration(n.Value)
		if err == nil {
			*into = d
			return true
		}
		problem = Quoted(n.Value) + " is not a duration"
	} else if IsScalar(n, "!!int") || IsScalar(n, "!!float") {
		problem = Cut(n.Value) + " has no unit"
	}
	p.Fail(n, key, problem, "write a number with its unit, such as 20ms, 1.5s or 1m")
	return false
}

// Word reads one of several words.
func (p *Parser) Word(n *yaml.Node, key string, words []string, into *string) bool {
	switch {
	case !IsScalar(n, "!!str"):
		p.Fail(n, key, "is "+Kind(n), "write "+Or(words))
	case !slices.Contains(words, n.Value):
		p.Fail(n, key, Quoted(n.Value)+" is not known here", "write "+Or(words))
	default:
		*into = n.Value
		return true
	}
	return false
}

// Items returns the texts and whole numbers of a list, and records each as the key with
// its index. The remedies are for a value that is not a list, and for items of another
// type.
func (p *Parser) Items(n *yaml.Node, key, notList, notItem string) (items []*yaml.Node, ok bool) {
	if n.Kind != yaml.SequenceNode {
		problem := "is " + Kind(n)
		if IsNull(n) {
			problem = "has no value"
		}
		p.Fail(n, key, problem, notList)
		return nil, false
	}
	ok = true
	for i, item := range n.Content {
		p.nodes[fmt.Sprintf("%s[%d]", key, i)] = item
		if !IsScalar(item, "!!str") && !IsScalar(item, "!!int") {
			p.Fail(item, key, "an item is "+Kind(item), notItem)
			ok = false
			continue
		}
		items = append(items, item)
	}
	return items, ok
}

// Or returns "a, b or c".
func Or(words []string) string {
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}

// IsScalar reports whether n is a scalar of a type such as "!!str".
func IsScalar(n *yaml.Node, tag string) bool {
	return n.Kind == yaml.ScalarNode && n.ShortTag() == tag
}

// IsNull reports whether n has no value.
func IsNull(n *yaml.Node) bool { return IsScalar(n, "!!null") }

// Kind describes n, to follow "is".
func Kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias (*" + Cut(n.Value) + "), which this file does not use"
	default:
	}
	switch tag := n.ShortTag(); tag {
	case "!!str":
		return "the text " + Quoted(n.Value)
	case "!!int", "!!float":
		return "the number " + Cut(n.Value)
	case "!!bool":
		return "the truth value " + Cut(n.Value)
	case "!!null":
		return "empty"
	case "!!timestamp":
		return "the date " + Cut(n.Value)
	default:
		return "of the type " + Cut(tag) + ", which this file does not use"
	}
}

// Quoted returns a text of the file, short and in quotes.
func Quoted(s string) string { return strconv.Quote(shorten(s)) }

// Cut returns a text of the file, short and printable.
func Cut(s string) string { return gpreempt.Printable(shorten(s)) }

func shorten(s string) string {
	const most = 60
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "..."
	}
	return s
}
