package hiplog

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// maxWindow bounds the memory of zstd to that of "zstd --long=27".
const maxWindow = 128 << 20

// Open returns the text of a log that may be compressed with gzip or zstd, detected by its
// first bytes. When the compressed data end early, reading ends with an error that wraps
// io.ErrUnexpectedEOF, after everything that could be decompressed. Close does not close r.
func Open(r io.Reader) (io.ReadCloser, error) {
	head := bufio.NewReaderSize(r, 64<<10)
	magic, _ := head.Peek(4) // a short read or an error repeats later
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(head)
		if err != nil {
			return nil, fmt.Errorf("cannot decompress with gzip: %w", truncated(err))
		}
		return &compressed{r: z, close: z.Close, format: "gzip"}, nil
	// A frame, or a skippable frame, with which pzstd begins.
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}),
		len(magic) == 4 && magic[0]>>4 == 5 && bytes.Equal(magic[1:], []byte{0x2a, 0x4d, 0x18}):
		z, err := zstd.NewReader(head, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, fmt.Errorf("cannot decompress with zstd: %w", truncated(err))
		}
		return &compressed{r: z, close: func() error { z.Close(); return nil }, format: "zstd"}, nil
	}
	return io.NopCloser(head), nil
}

// compressed adds the format to errors.
type compressed struct {
	r      io.Reader
	close  func() error
	format string
}

func (c *compressed) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("cannot decompress with %s: %w", c.format, err)
	}
	return n, err
}

func (c *compressed) Close() error { return c.close() }

// truncated converts the end of the data within a header to io.ErrUnexpectedEOF.
func truncated(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
