package driver

import (
	"encoding/binary"
	"reflect"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The argument of an ioctl is copied in to the structure of package kfd that belongs to
// the request, the handler works on its fields, and it is copied out again. As in the
// driver, the buffer between (kdata) has the larger of the sizes of caller and driver: a
// caller of another interface version gets back as many bytes as it passed.

// pointerField is a kfd.Pointer in a structure that was copied in. The pointer itself is
// NULL there: the address is one of the calling process.
type pointerField struct {
	field  *kfd.Pointer
	offset int
}

// ioctl returns the handler of a request whose argument is a T.
func ioctl[T any](handle func(*Driver, *call, *T) (r1 int, err errno)) handler {
	return func(d *Driver, c *call) (int, errno) {
		args := copyIn[T](c)
		r1, err := handle(d, c, args)
		encode(c.data, reflect.ValueOf(args).Elem())
		return r1, err
	}
}

// copyIn returns the argument as a T. Each pointer in it is NULL: see call.memory.
func copyIn[T any](c *call) *T {
	args := new(T)
	v := reflect.ValueOf(args).Elem()
	decode(v, c.data)
	for i := range v.NumField() {
		if f := v.Type().Field(i); f.Type == reflect.TypeFor[kfd.Pointer]() {
			c.pointers = append(c.pointers, pointerField{v.Field(i).Addr().Interface().(*kfd.Pointer), int(f.Offset)})
		}
	}
	return args
}

// memory returns what a field of the argument points to, nil for NULL.
func (c *call) memory(field *kfd.Pointer) Memory {
	for _, p := range c.pointers {
		if p.field != field {
			continue
		}
		if p.offset+8 > c.usize || binary.NativeEndian.Uint64(c.data[p.offset:]) == 0 {
			return nil
		}
		return c.arg.Pointer(p.offset)
	}
	return nil
}

// copyFrom is copy_from_user of n values. It returns false for EFAULT.
func copyFrom[T any](m Memory, n int) ([]T, bool) {
	values := make([]T, n)
	b := make([]byte, n*sizeOf[T]())
	if len(b) > 0 && (m == nil || !m.Read(b)) {
		return nil, false
	}
	decode(reflect.ValueOf(values), b)
	return values, true
}

// copyTo is copy_to_user. Zero bytes can be written at NULL. It returns false for EFAULT.
func copyTo(m Memory, b []byte) bool { return len(b) == 0 || m != nil && m.Write(b) }

// sizeOf is C's sizeof.
func sizeOf[T any]() int { return int(reflect.TypeFor[T]().Size()) }

// bytesOf returns a structure, or a slice of structures or numbers, as in memory.
func bytesOf(value any) []byte {
	v := reflect.ValueOf(value)
	n := int(v.Type().Size())
	if v.Kind() == reflect.Slice {
		n = v.Len() * int(v.Type().Elem().Size())
	}
	b := make([]byte, n)
	encode(b, v)
	return b
}

// decode sets the numbers of v, encode stores them in b. Both leave pointers and blank
// fields unchanged.
func decode(v reflect.Value, b []byte) {
	eachNumber(v, b, func(v reflect.Value, b []byte) {
		switch v.Kind() {
		case reflect.Uint64:
			v.SetUint(binary.NativeEndian.Uint64(b))
		case reflect.Int32:
			v.SetInt(int64(int32(binary.NativeEndian.Uint32(b))))
		default:
			v.SetUint(uint64(binary.NativeEndian.Uint32(b)))
		}
	})
}

func encode(b []byte, v reflect.Value) {
	eachNumber(v, b, func(v reflect.Value, b []byte) {
		switch v.Kind() {
		case reflect.Uint64:
			binary.NativeEndian.PutUint64(b, v.Uint())
		case reflect.Int32:
			binary.NativeEndian.PutUint32(b, uint32(v.Int()))
		default:
			binary.NativeEndian.PutUint32(b, uint32(v.Uint()))
		}
	})
}

// eachNumber calls do with each number of 32 or 64 bits in v and the bytes from there on.
func eachNumber(v reflect.Value, b []byte, do func(reflect.Value, []byte)) {
	switch v.Kind() {
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			eachNumber(v.Index(i), b[i*int(v.Type().Elem().Size()):], do)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.Name != "_" && f.Type != reflect.TypeFor[kfd.Pointer]() {
				eachNumber(v.Field(i), b[f.Offset:], do)
			}
		}
	default:
		do(v, b)
	}
}
