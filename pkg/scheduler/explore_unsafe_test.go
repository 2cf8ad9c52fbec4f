package scheduler

import (
	"reflect"
	"unsafe"
)

// An image is the contents of everything that a pointer reaches. restore writes it back to
// the same addresses, so every pointer stays valid, also those into the middle of a value.
// It follows the types by reflection: a new field of the core needs no change here.
type image struct {
	values []savedValue
	maps   []savedMap
	seen   map[seenValue]bool
}

// savedValue is a value, or the elements of a slice, and a copy of it.
type savedValue struct{ at, copied reflect.Value }

type savedMap struct {
	at   reflect.Value
	keys []reflect.Value
	vals []reflect.Value
}

type seenValue struct {
	at  unsafe.Pointer
	typ reflect.Type
	len int
}

// capture returns the image of what root points to. The fields named in skip, as
// "Type.field", are saved and not followed.
func capture(root any, skip map[string]bool) *image {
	m := &image{seen: map[seenValue]bool{}}
	m.follow(reflect.ValueOf(root), skip)
	m.seen = nil
	return m
}

// restore writes the image back.
func (m *image) restore() {
	for i := range m.values {
		v := &m.values[i]
		if v.at.Kind() == reflect.Slice {
			reflect.Copy(v.at, v.copied)
		} else {
			v.at.Set(v.copied)
		}
	}
	for i := range m.maps {
		s := &m.maps[i]
		s.at.Clear()
		for k, key := range s.keys {
			s.at.SetMapIndex(key, s.vals[k])
		}
	}
}

// first reports whether a value is met for the first time.
func (m *image) first(at unsafe.Pointer, t reflect.Type, n int) bool {
	key := seenValue{at, t, n}
	if m.seen[key] {
		return false
	}
	m.seen[key] = true
	return true
}

func (m *image) follow(v reflect.Value, skip map[string]bool) {
	switch v.Kind() {
	case reflect.Interface:
		m.follow(v.Elem(), skip)
	case reflect.Pointer:
		if v.IsNil() || !m.first(v.UnsafePointer(), v.Type(), 1) {
			return
		}
		at := reflect.NewAt(v.Type().Elem(), v.UnsafePointer()).Elem()
		copied := reflect.New(at.Type()).Elem()
		copied.Set(at)
		m.values = append(m.values, savedValue{at, copied})
		m.follow(at, skip)
	case reflect.Struct:
		for _, f := range followed(v.Type(), skip) {
			field := v.Field(f)
			m.follow(reflect.NewAt(field.Type(), field.Addr().UnsafePointer()).Elem(), skip)
		}
	case reflect.Array:
		if refers(v.Type().Elem()) {
			for i := range v.Len() {
				m.follow(v.Index(i), skip)
			}
		}
	case reflect.Slice:
		if v.Len() == 0 || !m.first(v.UnsafePointer(), v.Type(), v.Len()) {
			return
		}
		// The header lives elsewhere and changes; the elements stay where they are.
		elements := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		reflect.Copy(elements, v)
		m.values = append(m.values, savedValue{v.Slice(0, v.Len()), elements})
		if refers(v.Type().Elem()) {
			for i := range v.Len() {
				m.follow(v.Index(i), skip)
			}
		}
	case reflect.Map:
		if v.IsNil() {
			return
		}
		s := savedMap{at: reflect.ValueOf(v.Interface())}
		for key, val := range v.Seq2() {
			s.keys, s.vals = append(s.keys, key), append(s.vals, val)
			if val.Kind() != reflect.Struct { // a structure in a map is replaced, never changed
				m.follow(val, skip)
			}
		}
		m.maps = append(m.maps, s)
	default:
	}
}

var followedFields = map[reflect.Type][]int{}

// followed returns the fields of a structure that refer to other values.
func followed(t reflect.Type, skip map[string]bool) []int {
	fields, known := followedFields[t]
	if !known {
		for i := range t.NumField() {
			if f := t.Field(i); refers(f.Type) && !skip[t.Name()+"."+f.Name] {
				fields = append(fields, i)
			}
		}
		followedFields[t] = fields
	}
	return fields
}

var refersTo = map[reflect.Type]bool{}

// refers reports whether a value of the type refers to others that can change.
func refers(t reflect.Type) bool {
	known, ok := refersTo[t]
	if ok {
		return known
	}
	is := false
	switch t.Kind() {
	case reflect.Pointer, reflect.Interface, reflect.Slice, reflect.Map:
		is = true
	case reflect.Array:
		is = refers(t.Elem())
	case reflect.Struct:
		for f := range t.Fields() {
			is = is || refers(f.Type)
		}
	default:
	}
	refersTo[t] = is
	return is
}
