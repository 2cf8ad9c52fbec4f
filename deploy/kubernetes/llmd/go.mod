// An agent for llm-d's time slicing of reinforcement learning. A module and a program of its own; see docs/kubernetes.md.
module github.com/gpreempt/gpreempt/deploy/kubernetes/llmd

go 1.26.0

replace github.com/gpreempt/gpreempt => ../../..

require (
	github.com/google/go-cmp v0.7.0
	github.com/gpreempt/gpreempt v0.0.0-00010101000000-000000000000
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
)

require (
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.42.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260928230214-8a89bd6388cc // indirect
)
