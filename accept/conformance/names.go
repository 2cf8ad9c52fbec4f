package conformance

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// This file translates scripts to calls, and answers to the form of scripts.
// expand replaces a step by several: attach is everything of a daemon up to ENABLE, runtime
// is the start of a ROCm program.
func expand(s step, a *actor) []step {
	derive := func(verb string, args []string, values map[string]string) step {
		return step{where: s.where, text: s.text, actor: s.actor, verb: verb, args: args, values: values}
	}
	var steps []step
	if _, opened := a.fds["kfd"]; !opened && (s.verb == "attach" || s.verb == "runtime") {
		steps = append(steps, derive("open", nil, nil))
	}
	switch s.verb {
	case "attach":
		if _, ok := a.fds["ev"]; !ok {
			steps = append(steps, derive("pipe", []string{"ev"}, nil))
		}
		enable := derive("enable", s.args, maps.Clone(s.values))
		enable.answers = s.answers
		if _, ok := enable.values["fd"]; !ok {
			enable.values["fd"] = "ev"
		}
		return append(steps, derive("seize", s.args, nil), enable)
	case "runtime":
		enable := derive("runtime_enable", nil, s.values)
		enable.answers = s.answers
		return append(steps, enable)
	}
	return []step{s}
}

// resolve turns the names of a step into numbers.
func (p *play) resolve(s step, a *actor) (call, error) {
	c := call{Verb: s.verb, Values: map[string]string{}}
	for key, value := range s.values {
		if s.verb == "getfd" && key == "fd" {
			continue // a name of the other process
		}
		number, err := p.number(key, value, a)
		if err != nil {
			return call{}, fmt.Errorf("%s=%s: %w", key, value, err)
		}
		c.Values[key] = number
	}
	// The subject of a call, and its descriptor.
	if len(s.args) > 0 && s.verb != "pipe" && s.verb != "criu" {
		id, err := p.id(s.args[0])
		if err != nil {
			return call{}, err
		}
		c.Values["pid"] = id
	}
	switch s.verb {
	case "enable": // fd is that of the events
		c.Values["events"] = c.Values["fd"]
		delete(c.Values, "fd")
		if via, ok := s.values["via"]; ok {
			c.Values["fd"] = strconv.Itoa(a.fds[via])
		}
	case "criu":
		if len(s.args) > 0 {
			c.Values["op"] = s.args[0]
		}
	case "pipe":
		if len(s.args) > 1 {
			c.Values["mode"] = s.args[1]
		}
	case "getfd":
		whose := p.actors[s.args[0]]
		if whose == nil {
			return call{}, fmt.Errorf("unknown process %s", s.args[0])
		}
		theirs := "kfd"
		if given, ok := s.values["fd"]; ok {
			theirs = given
		}
		c.Values["theirs"] = strconv.Itoa(whose.fds[theirs])
		return c, nil
	}
	if _, ok := c.Values["fd"]; !ok {
		device := "kfd"
		if kmapVerbs[s.verb] != nil {
			device = "kmap"
		}
		if fd, ok := a.fds[device]; ok {
			c.Values["fd"] = strconv.Itoa(fd)
		}
	}
	return c, nil
}

// number resolves a value by its key.
func (p *play) number(key, value string, a *actor) (string, error) {
	switch key {
	case "fd", "via":
		if fd, ok := a.fds[value]; ok {
			return strconv.Itoa(fd), nil
		}
		if whose, fd, ok := strings.Cut(value, "."); ok && p.actors[whose] != nil {
			return strconv.Itoa(p.actors[whose].fds[fd]), nil
		}
		_, err := parseNumber(value)
		return value, err
	case "gpu", "access", "inplace", "none", "preferred", "prefetch":
		if n, ok := strings.CutPrefix(value, "g"); ok {
			i, err := strconv.Atoi(n)
			if err != nil || i >= len(p.host.gpus()) {
				return "", errors.New("no such GPU")
			}
			return strconv.FormatUint(uint64(p.host.gpus()[i]), 10), nil
		}
	case "source":
		if strings.HasPrefix(value, "g") {
			return p.number("gpu", value, a)
		}
	case "mask", "code":
		n, err := parseMask(value, key == "code")
		return strconv.FormatUint(n, 10), err
	case "clear":
		n, err := parseMask(value, false)
		return strconv.FormatUint(n, 10), err
	case "pid":
		return p.id(value)
	case "path": // {T} in it is T's pid
		before, name, after, ok := cutBraces(value)
		if !ok {
			return value, nil
		}
		id, err := p.id(name)
		return before + id + after, err
	case "to": // GPUs
		words := strings.Split(value, ",")
		for i, word := range words {
			id, err := p.number("gpu", word, a)
			if err != nil {
				return "", err
			}
			words[i] = id
		}
		return strings.Join(words, ","), nil
	case "fds":
		words := strings.Split(value, ",")
		for i, word := range words {
			fd, err := p.number("fd", word, a)
			if err != nil {
				return "", err
			}
			words[i] = fd
		}
		return strings.Join(words, ","), nil
	case "ids", "words", "pids":
		words := strings.Split(value, ",")
		for i, word := range words {
			id, err := p.idOrMarked(word)
			if err != nil {
				return "", err
			}
			words[i] = id
		}
		return strings.Join(words, ","), nil
	}
	return value, nil
}

// idOrMarked resolves a pid or a queue ID, with the driver's bits in the form of a reply.
func (p *play) idOrMarked(word string) (string, error) {
	parts := strings.Split(word, ":")
	id, err := p.id(parts[0])
	if err != nil || len(parts) == 1 {
		return id, err
	}
	n, err := parseNumber(id)
	if err != nil {
		return "", err
	}
	for _, part := range parts[1:] {
		switch part {
		case "invalid":
			n |= uint64(kfd.QueueInvalidMask)
		case "error":
			n |= uint64(kfd.QueueErrorMask)
		default:
			return "", fmt.Errorf("invalid mark %q of an ID", part)
		}
	}
	return strconv.FormatUint(n, 10), nil
}

// id returns a process's pid, a thread's ID, or the number itself.
func (p *play) id(word string) (string, error) {
	if _, err := parseNumber(word); err == nil {
		return word, nil
	}
	name, number, isThread := strings.Cut(word, ".")
	a, err := p.actor(name)
	if err != nil || !isThread {
		if err != nil {
			return "", err
		}
		return strconv.Itoa(int(a.process.pid())), nil
	}
	n, err := strconv.Atoi(number)
	if err != nil {
		return "", err
	}
	t, err := a.process.thread(n)
	if err != nil {
		return "", err
	}
	return strconv.Itoa(int(t.tid())), nil
}

func cutBraces(s string) (before, inside, after string, ok bool) {
	before, rest, ok := strings.Cut(s, "{")
	if !ok {
		return "", "", "", false
	}
	inside, after, ok = strings.Cut(rest, "}")
	return before, inside, after, ok
}

// shown returns a value of a reply in the form of scripts.
func (p *play) shown(key, value string) string {
	switch key {
	case "gpu", "gpus", "hung":
		words := strings.Split(value, ",")
		for i, word := range words {
			if n := slices.Index(p.host.gpus(), number32(word)); n >= 0 {
				words[i] = fmt.Sprint("g", n)
			}
		}
		return strings.Join(words, ",")
	case "pid", "words", "cycled":
		words := strings.Split(value, ",")
		for i, word := range words {
			for name, a := range p.actors {
				if strconv.Itoa(int(a.process.pid())) == word {
					words[i] = name
				}
			}
		}
		return strings.Join(words, ",")
	}
	return value
}

func number32(s string) uint32 {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0
	}
	return uint32(n)
}
