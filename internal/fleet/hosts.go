// Package fleet parses lists of hosts.
package fleet

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// DefaultPort is that of a daemon on another host, if an entry names none.
const DefaultPort = "7443"

// maxHosts bounds a list.
const maxHosts = 10_000

// Host is a daemon of a fleet.
type Host struct {
	// Name is how people know it.
	Name string
	// Address is "tcp://HOST:PORT", or Socket the path of a unix socket, as of a tunnel.
	Address, Socket string
}

// ParseHosts returns the hosts of a list. Entries are separated by commas, spaces or lines; # begins a
// comment. An entry is HOST, HOST:PORT, NAME=HOST:PORT or NAME=/SOCKET, and each may have ranges:
// node[001-200,300]. A name may occur once.
func ParseHosts(text string) ([]Host, error) {
	var all []Host
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		for _, entry := range split(line) {
			words, err := expand(entry, maxHosts-len(all))
			if err != nil {
				return nil, fmt.Errorf("hosts %q: %w", entry, err)
			}
			for _, word := range words {
				h, err := parseHost(word)
				if err != nil {
					return nil, err
				}
				if seen[h.Name] {
					return nil, fmt.Errorf("host %s is in the list twice", h.Name)
				}
				seen[h.Name] = true
				all = append(all, h)
			}
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no hosts: name them like gpu[01-16],gpu20:7443, or @FILE with a list")
	}
	return all, nil
}

// split returns the entries of a line. Commas in brackets are part of an entry.
func split(line string) []string {
	depth := 0
	return strings.FieldsFunc(line, func(r rune) bool {
		switch r {
		case '[':
			depth++
		case ']':
			depth = max(depth-1, 0)
		case ',':
			return depth == 0
		case ' ', '\t', '\r', '\n':
			return true
		}
		return false
	})
}

// expand replaces the first range of an entry, and then those of the results. It returns at most limit words. Brackets without a range, as in [::1]:7443, stay.
func expand(entry string, limit int) ([]string, error) {
	before, rest, found := strings.Cut(entry, "[")
	inside, after, closed := strings.Cut(rest, "]")
	if !found || strings.Contains(inside, ":") {
		if limit < 1 {
			return nil, fmt.Errorf("more than %d hosts", maxHosts)
		}
		return []string{entry}, nil
	}
	if !closed {
		return nil, fmt.Errorf("missing ]")
	}
	var all []string
	for part := range strings.SplitSeq(inside, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err := strconv.ParseUint(first, 10, 31)
		to, err2 := strconv.ParseUint(last, 10, 31)
		if err != nil || err2 != nil || from > to {
			return nil, fmt.Errorf("invalid range %q: use numbers, like [01-16,20]", part)
		}
		for n := from; n <= to; n++ {
			words, err := expand(fmt.Sprintf("%s%0*d%s", before, len(first), n, after), limit-len(all))
			if err != nil {
				return nil, err
			}
			all = append(all, words...)
		}
	}
	return all, nil
}

func parseHost(word string) (Host, error) {
	name, at, named := strings.Cut(word, "=")
	if !named {
		name, at = word, word
	}
	if strings.HasPrefix(at, "/") && named && name != "" {
		return Host{Name: name, Socket: at}, nil
	}
	host, port, err := net.SplitHostPort(at)
	if err != nil {
		host, port = strings.Trim(at, "[]"), DefaultPort
	}
	if name == "" || host == "" || strings.ContainsAny(host, "/[]=") || port == "" || strings.Trim(port, "0123456789") != "" {
		return Host{}, fmt.Errorf("invalid host %q: use HOST, HOST:PORT, NAME=HOST:PORT or NAME=/SOCKET", word)
	}
	if !named {
		name = host
	}
	return Host{Name: name, Address: "tcp://" + net.JoinHostPort(host, port)}, nil
}
