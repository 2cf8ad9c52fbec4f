package log

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Forwarded is a log entry of another process.
type Forwarded struct {
	Level   zapcore.Level
	Message string
	// Fields is a JSON object.
	Fields []byte
}

// Forward returns a logger whose entries are passed to send, by the goroutine that logs.
func Forward(send func(Forwarded)) *zap.Logger { return zap.New(forwarder{send: send}) }

type forwarder struct {
	send   func(Forwarded)
	fields []zapcore.Field
}

func (forwarder) Enabled(zapcore.Level) bool { return true }

func (f forwarder) With(fields []zapcore.Field) zapcore.Core {
	f.fields = slices.Concat(f.fields, fields)
	return f
}

func (f forwarder) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	return checked.AddCore(e, f)
}

func (f forwarder) Write(e zapcore.Entry, fields []zapcore.Field) error {
	values := zapcore.NewMapObjectEncoder()
	for _, field := range slices.Concat(f.fields, fields) {
		field.AddTo(values)
	}
	text, err := json.Marshal(values.Fields)
	f.send(Forwarded{Level: e.Level, Message: e.Message, Fields: text})
	return err
}

func (forwarder) Sync() error { return nil }

// Replay writes an entry of another process to logger.
func Replay(logger *zap.Logger, f Forwarded) {
	entry := zapcore.Entry{Level: f.Level, Time: time.Now(), LoggerName: logger.Name(), Message: f.Message}
	checked := logger.Core().Check(entry, nil)
	if checked == nil {
		return
	}
	values := map[string]any{}
	decoder := json.NewDecoder(bytes.NewReader(f.Fields))
	decoder.UseNumber()
	err := decoder.Decode(&values)
	var fields []zap.Field
	for _, key := range slices.Sorted(maps.Keys(values)) {
		fields = append(fields, zap.Any(key, values[key]))
	}
	if err != nil {
		fields = append(fields, Err(err))
	}
	checked.Write(fields...)
}
