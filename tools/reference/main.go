// Command reference writes docs/reference/api.md: the comments of api/proto in Markdown, from a
// FileDescriptorSet with source information on standard input.
package main

import (
	"cmp"
	"fmt"
	"io"
	"log"
	"os"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

const pkg = "gpreempt.v1"

func main() {
	in, err := io.ReadAll(os.Stdin)
	if err != nil {
		log.Fatalf("reference: read the descriptors: %v", err)
	}
	page, err := render(in)
	if err != nil {
		log.Fatalf("reference: %v", err)
	}
	if _, err := os.Stdout.WriteString(page); err != nil {
		log.Fatalf("reference: write the page: %v", err)
	}
}

// render returns the page for a serialized FileDescriptorSet.
func render(descriptors []byte) (string, error) {
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(descriptors, &set); err != nil {
		return "", err
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		return "", err
	}
	var (
		services []protoreflect.ServiceDescriptor
		messages []protoreflect.MessageDescriptor
		enums    []protoreflect.EnumDescriptor
	)
	files.RangeFilesByPackage(pkg, func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			services = append(services, f.Services().Get(i))
		}
		for i := range f.Messages().Len() {
			messages = append(messages, f.Messages().Get(i))
		}
		for i := range f.Enums().Len() {
			enums = append(enums, f.Enums().Get(i))
		}
		return true
	})
	// The service of inference servers first.
	slices.SortFunc(services, func(a, b protoreflect.ServiceDescriptor) int { return -cmp.Compare(a.Name(), b.Name()) })
	slices.SortFunc(messages, byName)
	slices.SortFunc(enums, byName)

	var b strings.Builder
	b.WriteString(`# API reference

Generated from the comments of [api/proto](../../api/proto/gpreempt/v1) by ` + "`make gen`" + `. For developers of clients: every call, message and value
of package ` + "`" + pkg + "`" + `. [api.md](../api.md) has rights, limits and errors.
`)
	for _, s := range services {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", s.Name(), comment(s))
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			fmt.Fprintf(&b, "\n### %s.%s\n\n%s%s returns %s%s\n\n%s\n", s.Name(), m.Name(),
				stream(m.IsStreamingClient()), link(m.Input()), stream(m.IsStreamingServer()), link(m.Output()), comment(m))
		}
	}
	b.WriteString("\n## Messages\n")
	for _, m := range messages {
		fmt.Fprintf(&b, "\n### %s\n\n%s\n", m.Name(), comment(m))
		if m.Fields().Len() == 0 {
			continue
		}
		b.WriteString("\n| field | type | meaning |\n|---|---|---|\n")
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", f.Name(), fieldType(f), cell(f))
		}
	}
	b.WriteString("\n## Enumerations\n")
	for _, e := range enums {
		fmt.Fprintf(&b, "\n### %s\n\n%s\n\n| value | number | meaning |\n|---|---|---|\n", e.Name(), comment(e))
		for i := range e.Values().Len() {
			v := e.Values().Get(i)
			fmt.Fprintf(&b, "| `%s` | %d | %s |\n", v.Name(), v.Number(), cell(v))
		}
	}
	return b.String(), nil
}

func byName[D protoreflect.Descriptor](a, b D) int { return cmp.Compare(a.Name(), b.Name()) }

// comment returns the comment above a declaration.
func comment(d protoreflect.Descriptor) string {
	text := d.ParentFile().SourceLocations().ByDescriptor(d).LeadingComments
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i, line := range lines {
		lines[i] = strings.ReplaceAll(strings.TrimSpace(line), "<", `\<`)
	}
	return strings.Join(lines, "\n")
}

// cell returns the comment above a declaration in one line.
func cell(d protoreflect.Descriptor) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(comment(d)), " "), "|", `\|`)
}

func stream(yes bool) string {
	if yes {
		return "stream of "
	}
	return ""
}

// link returns the name of a type, with a link where this page describes it.
func link(d protoreflect.Descriptor) string {
	if d.ParentFile().Package() != pkg {
		return "`" + string(d.FullName()) + "`"
	}
	return fmt.Sprintf("[%s](#%s)", d.Name(), strings.ToLower(string(d.Name())))
}

// fieldType returns the type of a field, and whether it may repeat or be absent.
func fieldType(f protoreflect.FieldDescriptor) string {
	var kind string
	switch {
	case f.IsMap():
		return "map of " + f.MapKey().Kind().String() + " to " + f.MapValue().Kind().String()
	case f.Message() != nil:
		kind = link(f.Message())
	case f.Enum() != nil:
		kind = link(f.Enum())
	default:
		kind = f.Kind().String()
	}
	switch o := f.ContainingOneof(); {
	case f.IsList():
		return "repeated " + kind
	case f.HasOptionalKeyword():
		return "optional " + kind
	case o != nil:
		return kind + ", one of `" + string(o.Name()) + "`"
	}
	return kind
}
