# Everything here is a command a person could type; `make help` lists it.
# Nothing needs a GPU: tests and demo run on simulated and emulated ones.

GO      ?= go
RACE    ?= -race
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)

# The tools are pinned in a module of their own.
TOOL      := $(GO) tool -modfile=tools/go.mod
LDFLAGS   := -s -w -X github.com/gpreempt/gpreempt/internal/api.Version=$(VERSION)
# The version is ours to say, so the build does not depend on what git allows.
BUILDFLAGS = -trimpath -buildvcs=false

COUNT    ?= 20
FUZZTIME ?= 20s
FUZZ_PACKAGES ?= accept cmd emu internal lab pkg
SOAK     ?= 1h
BENCH    ?=
# Where goroutines, locks and timers meet.
RACE_PACKAGES  ?= ./pkg/scheduler/... ./internal/daemon/... ./internal/events/... ./internal/targets/... \
	./internal/inventory/... ./internal/auth/... ./internal/server/...

# dist: the times of all files are that of the commit.
ARCHS ?= amd64,arm64
COMMITS ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help count gen policies check-gen lint lint-proto lint-go lint-mod fmt kernels test test-full race build demo bench bench-quick rows fuzz explore history crashes mutate clib clib-install clib-test e2e e2e-full e2e-rocm vm-kfd vm-softgpu vm-kmap kernel-check nightly vmtest slurm engines soak hostile python-test python-soak python-bench kubernetes kubernetes-test kubernetes-api vulncheck dist dist-twice sign packages-test fuzz-build clean packages versions fleet-scale cluster kernel-userq kernel-strings

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The Python client makes its messages from these descriptors.
DESCRIPTORS = bindings/python/gpreempt/api.binpb
API_REFERENCE = $(TOOL) buf build --as-file-descriptor-set -o - | (cd tools && $(GO) run ./reference)
# Their tests write pages of docs/reference, and lists of documents, with -update.
REFERENCES := ./internal/safety ./internal/server ./internal/events ./internal/log ./pkg/gpreempt ./test/arch
gen: ## Generate api/gen, the descriptors of the Python client, docs/reference and the lists of docs/architecture.md
	$(TOOL) buf generate
	$(TOOL) buf build --as-file-descriptor-set --exclude-source-info -o $(DESCRIPTORS)
	$(API_REFERENCE) > docs/reference/api.md
	$(GO) test -count=1 -run '^TestReference|^TestListsOfTheDocuments$$' $(REFERENCES) -update
	$(GO) test -C lab -count=1 -run '^TestReference' ./scenario -update
	cd deploy/packaging && $(GO) test -count=1 -run '^TestReferenceOfTheCommands' . -update

# What later versions have to go on reading: docs/api.md, Versions.
VERSION1 = test/e2e/testdata/version1
versions: ## Record the API, its answers and an export of events anew, as those of version 1, which is permitted before the first release only
	cp $(DESCRIPTORS) $(VERSION1)/api.binpb
	$(GO) test -count=1 -run 'OfVersion1' ./test/e2e -update

policies: ## Simulate the knobs of the policy: docs/reference/policies.md and its pictures
	$(GO) test -C lab -count=1 -run '^TestPolicyDocumentIsFresh$$' ./report -update

check-gen: ## Fail when generated code or the reference are not what their generators write
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(TOOL) buf generate -o "$$tmp"; \
	diff -r "$$tmp/api/gen" api/gen || { echo 'api/gen is stale: run make gen' >&2; exit 1; }; \
	$(TOOL) buf build --as-file-descriptor-set --exclude-source-info -o "$$tmp/api.binpb"; \
	cmp "$$tmp/api.binpb" $(DESCRIPTORS) || { echo '$(DESCRIPTORS) is stale: run make gen' >&2; exit 1; }; \
	$(API_REFERENCE) > "$$tmp/api.md"; \
	cmp "$$tmp/api.md" docs/reference/api.md || { echo 'docs/reference/api.md is stale: run make gen' >&2; exit 1; }; \
	$(GO) test -run '^TestReference|^TestListsOfTheDocuments$$' $(REFERENCES); \
	$(GO) test -C lab -run '^TestReference|^Test(Validation|Policy)DocumentIsFresh$$' ./report ./scenario ./sim; \
	cd deploy/packaging && $(GO) test -run '^TestReferenceOfTheCommands' .

lint: lint-proto lint-go lint-mod ## Check style of protos, Go and module files (make -k lint: all findings)

lint-proto:
	$(TOOL) buf lint
	$(TOOL) buf format --diff --exit-code
	$(TOOL) buf breaking --against $(VERSION1)/api.binpb

lint-go:
	$(GO) vet ./...
	$(TOOL) golangci-lint run
	$(TOOL) golangci-lint fmt --diff
	cd lab && $(GO) vet ./... && $(GO) tool -modfile=../tools/go.mod golangci-lint run

lint-mod:
	$(GO) mod tidy -diff
	cd lab && $(GO) mod tidy -diff
	cd tools && $(GO) mod tidy -diff
	cd examples/go && $(GO) mod tidy -diff && $(GO) vet .

# apt-get install -y --no-install-recommends clang-22 lld-22
LLVM    ?= /usr/lib/llvm-22/bin
KERNELS ?= accept/workload/kernels
kernels: ## Build the code objects of the acceptance from kernels.c, the same bytes from the same LLVM
	@cd accept/workload/kernels && for gpu in gfx90a gfx942 gfx950; do \
	$(LLVM)/clang --target=amdgcn-amd-amdhsa -mcpu=$$gpu -nogpulib -ffreestanding -std=c23 -O2 -Wall -Wextra -Werror \
		-mcode-object-version=5 --ld-path=$(LLVM)/ld.lld -Wl,-s -o "$(abspath $(KERNELS))/$$gpu.co" kernels.c && \
	chmod 644 "$(abspath $(KERNELS))/$$gpu.co" || exit; done && cd "$(abspath $(KERNELS))" && sha256sum *.co > SHA256SUMS

fmt: ## Format Go and protos in place
	$(TOOL) golangci-lint fmt
	$(TOOL) buf format -w

# All but the end-to-end tests, which build and run the binaries (make e2e).
TEST_PACKAGES = $$($(GO) list ./... | grep -v /test/e2e)
# A change is tested with less random depth, and without what lasts or measures; make nightly has all of it.
SHORT ?= -short
test: ## Run the tests of all packages, with the race detector (RACE= without, SHORT= in full depth)
	$(GO) test $(RACE) $(SHORT) -timeout 30m $(TEST_PACKAGES)
	$(GO) test -C lab $(RACE) $(SHORT) -timeout 30m ./...

test-full: SHORT =
test-full: test

race: ## Run the concurrent packages COUNT times with the race detector
	$(GO) test -race -count=$(COUNT) -timeout 30m $(RACE_PACKAGES)

# Hand-written Go without tests, in lines: the product, what tests and measures it, and what each program links.
PROGRAMS := ./cmd/gpreemptd ./cmd/gpctl ./accept/cmd/gpaccept ./emu/cmd/kfdemu
# Markdown that no program writes and that is no translation.
BY_HAND = git ls-files -- '*.md' | grep -vE '^(CHANGELOG|README\.zh-CN)\.md$$|^docs/(reference|zh-CN)/|/testdata/'
count: ## Count lines of product, lab and kit and of what each program links, packages, import cycles, and words of the documents
	@lines() { git ls-files -- "$$@" | grep '\.go$$' | grep -v '_test\.go$$' | xargs cat | wc -l; }; \
	linked() { $(GO) list -C "$$1" -deps -f '{{if not .Standard}}{{$$d := .Dir}}{{range .GoFiles}}{{$$d}}/{{.}}{{"\n"}}{{end}}{{end}}' "$$2" | grep "^$$PWD/" | grep -v /api/gen/ | xargs cat | wc -l; }; \
	printf '%-28s %7d\n' 'product, lines' $$(($$(lines cmd internal pkg) - $$(lines internal/testutil))) \
		'kit and benchmarks, lines' "$$(lines emu test internal/testutil)" 'acceptance, lines' "$$(lines accept)" 'lab, lines' "$$(lines lab)"; \
	for program in $(PROGRAMS); do printf '%-28s %7d\n' "linked into $${program##*/}, lines" "$$(linked . $$program)"; done; \
	printf '%-28s %7d\n' 'linked into gplab, lines' "$$(linked lab ./cmd/gplab)" 'packages, without the lab' "$$($(GO) list ./... | wc -l)" \
		'import cycles' "$$({ $(GO) list -f '{{with .Error}}{{.}}{{end}}' -e ./...; $(GO) list -C lab -f '{{with .Error}}{{.}}{{end}}' -e ./...; } | grep -c 'import cycle' || true)" \
		'words of Markdown by hand' "$$($(BY_HAND) | xargs cat | wc -w)" 'pages in docs' "$$(git ls-files -- 'docs/*.md' | grep -cv '^docs/.*/')"

build: ## Build gpreemptd, gpctl, gplab, gpaccept and kfdemu into build/
	CGO_ENABLED=0 $(GO) build $(BUILDFLAGS) -ldflags '$(LDFLAGS)' -o build/ ./cmd/... ./accept/cmd/... ./emu/cmd/...
	CGO_ENABLED=0 $(GO) build -C lab $(BUILDFLAGS) -ldflags '$(LDFLAGS)' -o ../build/ ./cmd/...

demo: build ## Measure what gpreempt does for inference, on an emulated GPU or a simulated one (DEMO=--sim): bars, and build/demo.svg
	build/kfdemu demo --json build/demo.json --svg build/demo.svg $(DEMO)

bench: ## Measure what the daemon costs, as ratios in one run: a table, and build/bench.txt (BENCH='-only de')
	$(GO) build -o build/bench ./test/bench
	build/bench $(BENCH)

ROWS ?=
# What is not there is skipped: the packages of clib, a PYTHON with protobuf and torch, the real captures.
rows: build ## Run a command for each requirement of the design documents, R1 to R69, on emulated machines and real captures, and judge what it prints: a table, and build/rows.json (ROWS="-only 'R5|R47'", ROWS='-shell job')
	$(GO) build -o build/rows ./test/rows
	build/rows $(ROWS)

HOSTS ?= 1000
GPUS  ?= 8
TIME  ?= 5m
INTERVAL ?= 15s
fleet-scale: ## Scrape HOSTS simulated hosts with GPUS GPUs every INTERVAL for TIME by a real Prometheus, and query it: tables (FLEET=-native for native histograms); skips without prometheus
	$(GO) build -o build/fleetscale ./test/fleetscale
	build/fleetscale -hosts $(HOSTS) -gpus $(GPUS) -interval $(INTERVAL) -time $(TIME) $(FLEET)

bench-quick: ## Measure the guarded ratios, in under a minute, and fail when one has grown by half
	$(GO) build -o build/bench ./test/bench
	build/bench -quick

# One worker for each target, and one target for each CPU at a time. A failure is retried
# once: Go before 1.27 may report the end of FUZZTIME as a failure (golang/go#75804). A
# real finding is in testdata after the first run, and fails the second at once.
define fuzz_one
file=$${1%%:*}; func=$${1##*func }; \
dir=$$(dirname "$$file"); case $$dir in lab/*) module=lab dir=$${dir#lab/};; *) module=.;; esac; \
set -- -C "$$module" -run "^$$" -fuzz "^$$func\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 2s -parallel 1 "./$$dir"; \
out=$$($(GO) test "$$@" 2>&1) || out=$$($(GO) test "$$@" 2>&1) || { echo "$(GO) test $$*"; echo "$$out"; exit 255; }; \
echo "$$func: $$(echo "$$out" | grep "^fuzz:" | tail -n 1)"
endef
export fuzz_one
fuzz: ## Fuzz each target for FUZZTIME
	@grep -rEo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]+' $(FUZZ_PACKAGES) | \
	xargs -d '\n' -n 1 -P "$$(nproc)" sh -c "$$fuzz_one" fuzz

# The script for a service that fuzzes continuously; test/arch fails when it lacks a target.
fuzz-build: ## Write deploy/fuzz/build.sh: how to build each target for OSS-Fuzz
	$(GO) test -count=1 -run '^TestFuzzBuildHasEveryTarget$$' ./test/arch -update

# The race detector in the programs makes each start of one several times as long, and their packages are tested with it.
E2E_RACE ?=
e2e: ## Test the built binaries against each other, on simulated and emulated GPUs; figures in build/e2e.json (SHORT= E2E_RACE=-race: all, with the race detector in the daemon)
	GPREEMPT_E2E_RACE=$(E2E_RACE) $(GO) test $(SHORT) -count=1 -parallel 4 -timeout 90m -skip '^TestCLibrary|^TestSlurm' ./test/e2e

e2e-full: SHORT =
e2e-full: E2E_RACE = $(RACE)
e2e-full: e2e

# apt-get install -y --no-install-recommends gcc libc6-dev libnghttp2-dev libnanopb-dev nanopb protobuf-compiler libprotobuf-dev pkg-config
clib: ## Build the C library into build/clib
	@$(MAKE) --no-print-directory -C bindings/c

PREFIX ?= /usr/local
clib-install: ## Install the C library, its header and pkg-config file (PREFIX=/usr/local DESTDIR=)
	@$(MAKE) --no-print-directory -C bindings/c install PREFIX='$(PREFIX)'

clib-test: ## Test the C library on a simulated GPU, also under valgrind and from Python; skips what is not installed
	$(GO) test -count=1 -timeout 10m -v -run '^TestCLibrary' ./test/e2e

# apt-get install -y --no-install-recommends gcc libc6-dev rocminfo rocm-smi libhsakmt-dev libhsa-runtime-dev
e2e-rocm: ## Run AMD's own tools and libraries on an emulated GPU; skips what is not installed
	GPREEMPT_E2E_RACE=$(RACE) $(GO) test -tags rocm -count=1 -timeout 10m -v -run '^TestROCm' ./test/e2e

# Package, package=pattern of its tests, or package=pattern!pattern of tests to leave out.
VM_PACKAGES ?= ./accept/conformance=TestRealDriver ./internal/proc ./internal/mechanism/dbgtrap=TestRealDriver \
	./lab/kfdtrace=TestRealTracefs
# A series of Debian's kernels, such as 7.3, or the path of a built kernel with a slash.
KERNEL ?= 6.12
# Since 7.2 the driver refuses to open /dev/kfd without a GPU node.
VM_NODE = $(if $(filter 6.12,$(KERNEL)),,-softgpu softgpu=1)
vm-kfd: ## Test on the real driver of Debian's kernel in QEMU, without a GPU (KERNEL=6.12|7.2|7.3|PATH/); skips without QEMU
	$(GO) run ./emu/vm -kernel '$(KERNEL)' $(VM_NODE) -limit 20m $(VM_PACKAGES)

# apt-get install -y --no-install-recommends qemu-system-x86 gcc-12 libc6-dev make xz-utils
# Each in a guest of its own, two at a time: a guest has one CPU. The longest is the first.
SOFTGPU_PACKAGES ?= './test/e2e=^TestSoftGPUAcceptance' ./accept/conformance=TestRealDriver './test/e2e=^TestSoftGPU!^TestSoftGPUAcceptance'
SOFTGPU ?= softgpu=2
vm-softgpu: ## Test on the real driver with GPU nodes but no GPU: builds amdgpu with emu/softgpu, for minutes the first time (KERNEL=6.12|7.2|7.3|PATH/); skips without QEMU or gcc
	printf '%s\n' $(SOFTGPU_PACKAGES) | xargs -P 2 -I TESTS \
		$(GO) run ./emu/vm -kernel '$(KERNEL)' -softgpu '$(SOFTGPU)' -with ./cmd/gpreemptd,./cmd/gpctl,./accept/cmd/gpaccept,./emu/cmd/kfdemu -limit 20m TESTS

kernel-userq: ## Say whether the kernel sources KERNEL_TREES="DIR..." accept user queues of DRM by default or can suspend them: docs/lab/user-queues.md
	GPREEMPT_KERNEL_TREES="$$(realpath $(KERNEL_TREES) | paste -sd:)" $(GO) test -count=1 -v -run '^TestUserQueuesOfKernelSources$$' ./emu/vm

kernel-strings: ## Classify the kernel log messages of amdgpu in the trees KERNEL_TREES, and list what is new, gone and unmatched since the last time
	@test -n '$(KERNEL_TREES)' || { echo 'kernel-strings: KERNEL_TREES is missing: the directories of kernel sources, oldest first' >&2; exit 2; }
	$(GO) test -count=1 -v -run '^TestEveryMessageOfTheDriverIsClassified$$' ./internal/safety -update -kernels '$(KERNEL_TREES)'

KERNEL_PATCH = deploy/kernel/kfd_kmap.patch
# apt-get install -y --no-install-recommends gcc-12 libc6-dev make xz-utils patch perl
kernel-check: ## Apply the kernel extension to Debian's source, run checkpatch and compile it with all warnings; skips without the package or gcc
	$(GO) run ./emu/vm -kernel '$(KERNEL)' -check -patch $(KERNEL_PATCH)

# The guest's kernel checks its memory in the second run.
KMAP_PACKAGES ?= ./accept/conformance=TestRealDriver
vm-kmap: ## Test the driver with the kernel extension, in the guest of vm-softgpu: the whole table, then once more with slub_debug
	$(GO) run ./emu/vm -kernel '$(KERNEL)' -softgpu '$(SOFTGPU)' -patch $(KERNEL_PATCH) -clean -limit 30m $(KMAP_PACKAGES)
	$(GO) run ./emu/vm -kernel '$(KERNEL)' -softgpu '$(SOFTGPU)' -patch $(KERNEL_PATCH) -clean -append slub_debug=FZPU -limit 30m $(KMAP_PACKAGES)

# What lasts, what measures and so depends on the machine, and other kernels: 6.12's vm-kfd is part of each change's checks.
NIGHTLY = test-full: e2e-full: rows: engines: demo: bench-quick: fuzz: mutate: vm-softgpu:6.12 vm-kfd:7.2 vm-softgpu:7.2 vm-kfd:7.3 vm-softgpu:7.3
nightly: ## Run all tests in full depth, the measurements, fuzzing, mutate, and the tests on the real drivers of all kernels, before an issue is closed: for hours, and a table at the end
	@results=$$(mktemp); status=0; for each in $(NIGHTLY); do \
		began=$$(date +%s); out=$$(mktemp); \
		if $(MAKE) --no-print-directory "$${each%%:*}" KERNEL="$${each#*:}" >"$$out" 2>&1; then result=$$(grep -q '^SKIP' "$$out" && echo SKIP || echo ok); else result=FAILED; status=1; fi; \
		if [ $$result = FAILED ]; then cat "$$out"; else grep -E '^(SKIP|vm: |killed  |[a-z ]+: docs/)|expectations,' "$$out"; fi; rm "$$out"; \
		printf '%-12s %-6s %-6s %6d s\n' "$${each%%:*}" "$${each#*:}" "$$result" $$(($$(date +%s) - began)) >>"$$results"; \
	done; cat "$$results"; rm "$$results"; exit $$status

packages:
	rm -rf build/packages
	cd deploy/packaging && $(GO) run . -version '$(VERSION)' -commits $(COMMITS) -date $(SOURCE_DATE_EPOCH) -arch amd64 -out ../../build/packages

# apt-get install -y --no-install-recommends qemu-system-x86 mmdebstrap e2fsprogs
vmtest: packages ## Test the deb from install to purge, and the service that it installs, in a Debian guest in QEMU; skips without QEMU or mmdebstrap
	$(GO) run ./emu/vm -deb build/packages/gpreempt_*.deb -limit 20m './test/e2e=^TestGuest'

# apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge slurmdbd slurm-wlm-mysql-plugin mariadb-server
slurm: ## Test deploy/slurm with Debian's Slurm on an emulated node with 8 GPUs, and list what that proves; needs root, skips what is not installed
	GPREEMPT_SLURM=1 $(GO) test -count=1 -timeout 5m -v -run '^TestSlurm' ./test/e2e

# apt-get install -y --no-install-recommends docker.io podman runc
engines: ## Test trials of containers that Debian's Docker and Podman run; needs root, skips what is not installed
	GPREEMPT_ENGINES=1 $(GO) test -count=1 -timeout 10m -v -run '^TestEngine' ./test/e2e

# The race detector's memory grows over time, so the daemon is built without it.
soak: ## Run the soak tests, end to end, of the tracer and of the inventory, for SOAK each
	@grep -q '^func TestSoak' test/e2e/*_test.go || { echo 'test/e2e has no soak test' >&2; exit 1; }
	GPREEMPT_SOAK=$(SOAK) $(GO) test -count=1 -timeout 0 -v -run '^TestSoak' ./test/e2e
	GPREEMPT_SOAK=$(SOAK) $(GO) test $(RACE) -count=1 -timeout 0 -v -run '^TestSoak' ./internal/proc ./internal/inventory

STATES ?= 10000000
explore: ## Follow every history of the scheduler until there are STATES states: half an hour and 2 GiB for 10^7
	GPREEMPT_EXPLORE=$(STATES) $(GO) test -count=1 -timeout 0 -v -run '^TestEveryHistoryUpToABoundKeepsThePromises$$' ./pkg/scheduler

FAULTS ?= 3000
history: ## Have FAULTS random faults strike the daemon on an emulated GPU, and check the recorded history (SEED= repeats one)
	GPREEMPT_HISTORY_FAULTS=$(FAULTS) GPREEMPT_HISTORY_SEED=$(SEED) $(GO) test -count=1 -timeout 0 -v -run '^TestHistoryOfRandomFaults$$' ./test/e2e

# A third each with the fake driver's dbgtrap and criu, and of the rest half each by the freezer
# on real processes and by the built daemon on emulated GPUs.
# The daemon of the first line dies in a fake machine; the others are programs that get a SIGKILL, the
# last one on 3 machines.
CRASHES ?= 2000
crashes: ## Kill daemons CRASHES times with each mechanism, at its steps and at random: nothing may stay suspended
	GPREEMPT_CRASHES=$(CRASHES) $(GO) test -count=1 -timeout 0 -run '^TestDeathAtEveryCall' ./internal/mechanism/dbgtrap ./internal/mechanism/criu ./internal/mechanism/nvchannels
	GPREEMPT_CRASHES=$(CRASHES) $(GO) test -count=1 -timeout 0 -v -run '^TestNoProcessStaysPausedAfterTheDaemonIsKilled$$' ./internal/mechanism/freezer
	GPREEMPT_CRASHES=$$(($(CRASHES) * 3)) $(GO) test -count=1 -timeout 0 -v -run '^TestSoakDaemonKilledAnywhereLeavesEveryQueueRunning$$' ./test/e2e

MUTATE ?= .
mutate: ## Break each promise of docs/reliability.md and docs/threat-model.md by a line of the product, and see a test named there fail (MUTATE=PATTERN of row, file or test)
	GPREEMPT_MUTATE='$(MUTATE)' $(GO) test -count=1 -timeout 0 -v -run '^TestEachMutationIsKilledByATestOfItsRow$$' ./test/arch

HOSTILE ?= 2s
hostile: ## Abuse each method of each service for HOSTILE over each transport in each way, and judge what others see: a table, and build/hostile.json (ONLY=TRANSPORT/ABUSE/METHOD or a part of it)
	GPREEMPT_HOSTILE=$(HOSTILE) GPREEMPT_HOSTILE_ONLY='$(ONLY)' $(GO) test -count=1 -timeout 0 -v -run '^TestHostileClientsOfEveryMethod$$' ./test/e2e

kubernetes: ## Write the config file of the Helm chart and the manifests rendered from it
	cd deploy/kubernetes && $(GO) test -count=1 -run '^TestConfigFileOfTheChart' . -update
	cd deploy/kubernetes && $(GO) test -count=1 -run '^TestManifests' . -update

kubernetes-test: ## Test chart, manifests, examples, the CSI driver and the agent for llm-d against the APIs of Kubernetes and Kueue; skips where their modules are not available
	@set -e; for dir in deploy/kubernetes deploy/kubernetes/csi deploy/kubernetes/llmd deploy/kubernetes/examples/batch; do ( cd $$dir && if ! $(GO) list -deps -test ./... >/dev/null 2>&1; then \
		echo "SKIP: the modules of $$dir are not available; go list -deps -test ./... there says why"; \
	else $(GO) mod tidy -diff && $(GO) vet ./... && $(GO) test -timeout 10m ./...; fi ); done

# apt-get install -y --no-install-recommends etcd-server
kubernetes-api: ## Have a real API server accept them: builds kube-apiserver, for minutes; skips without etcd
	cd deploy/kubernetes && $(GO) build -o ../../build/ k8s.io/kubernetes/cmd/kube-apiserver
	cd deploy/kubernetes && PATH="$(CURDIR)/build:$$PATH" $(GO) test -count=1 -v -run '^TestAPIServer' .

# apt-get install -y --no-install-recommends etcd-server containerd runc containernetworking-plugins iproute2
CLUSTER = $(CURDIR)/build/cluster
CLUSTER_TESTS ?= .
cluster: export CGO_ENABLED = 0
cluster: ## Test the chart on a Kubernetes cluster of one node with an EMULATED GPU, as root (CLUSTER_TESTS=PATTERN); skips without a piece of it
	@set -e; cd deploy/kubernetes/cluster; for dir in . kube; do if ! $(GO) list -C $$dir -deps -test ./... >/dev/null 2>&1; then \
		echo "SKIP: the modules of deploy/kubernetes/cluster/$$dir are not available; go list -deps -test ./... there says why"; exit 0; fi; done; \
	mkdir -p $(CLUSTER)/v1 $(CLUSTER)/v2; \
	$(GO) build -C kube $(BUILDFLAGS) -ldflags '-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36' \
		-o $(CLUSTER)/kube .; \
	$(GO) build $(BUILDFLAGS) -o $(CLUSTER)/node ./node; \
	$(GO) build -C ../csi $(BUILDFLAGS) -o $(CLUSTER)/gpreempt-csi .; \
	$(GO) build -C ../csi $(BUILDFLAGS) -o $(CLUSTER)/gpreempt-node ./node; \
	$(GO) build -C ../../.. $(BUILDFLAGS) -o $(CLUSTER)/ ./emu/cmd/kfdemu ./cmd/gpctl; \
	for version in v1 v2; do $(GO) build -C ../../.. $(BUILDFLAGS) -ldflags '-X github.com/gpreempt/gpreempt/internal/api.Version='$$version \
		-o $(CLUSTER)/$$version/ ./cmd/gpreemptd; done; \
	GPREEMPT_CLUSTER=$(CLUSTER) $(GO) test $(BUILDFLAGS) -count=1 -v -timeout 30m -run '$(CLUSTER_TESTS)' .

# Exit status 3: vulnerabilities that the code reaches. Without the database nothing was checked.
VULNDB ?= https://vuln.go.dev
vulncheck: ## Look for known vulnerabilities that the shipped programs reach; skips without the database (VULNDB=URL)
	@for dir in . lab deploy/kubernetes/csi deploy/kubernetes/llmd; do \
		out=$$($(GO) tool -modfile=$(CURDIR)/tools/go.mod govulncheck -C $$dir -db '$(VULNDB)' ./... 2>&1); code=$$?; \
		case "$$code $$out" in \
		0*) echo "$$dir: $$out" ;; \
		1*"fetching vulnerabilities:"*) echo "SKIP $$dir: nothing was checked, the database is not available: $$out" ;; \
		*) echo "$$dir: $$out"; exit "$$code" ;; \
		esac; \
	done

dist: ## Make tar.gz, debs, rpms, wheel, SBOM and checksums in dist/, the same bytes from the same commit (ARCHS=amd64,arm64)
	rm -rf dist
	cd deploy/packaging && $(GO) run . -version '$(VERSION)' -commits $(COMMITS) -date $(SOURCE_DATE_EPOCH) -arch $(ARCHS) -out ../../dist

dist-twice: ## Make dist from two copies of the commit, in directories and with umasks that differ, and compare
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	for copy in one/short another/much/longer; do \
		mkdir -p "$$tmp/$$copy"; git archive HEAD | tar -x -C "$$tmp/$$copy"; \
		case $$copy in one/*) umask 022 ;; *) umask 077 ;; esac; \
		$(MAKE) --no-print-directory -C "$$tmp/$$copy" dist VERSION='$(VERSION)' COMMITS=$(COMMITS) SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH); \
	done; \
	cmp "$$tmp/one/short/dist/SHA256SUMS" "$$tmp/another/much/longer/dist/SHA256SUMS" && echo 'twice the same bytes'

# KEY is a private SSH key, or the public one of a key in an agent or on a token. docs/install.md has the other side.
sign: ## Sign dist/SHA256SUMS with an SSH key (KEY=FILE): dist/SHA256SUMS.sig
	@test -n '$(KEY)' || { echo 'sign: KEY is missing: make sign KEY=FILE, an SSH key' >&2; exit 2; }
	@cd dist && sha256sum --quiet --strict -c SHA256SUMS && rm -f SHA256SUMS.sig && ssh-keygen -Y sign -n gpreempt-release -f '$(abspath $(KEY))' SHA256SUMS

# apt-get install -y --no-install-recommends lintian rpm cpio python3-pip python3-setuptools python3-wheel qemu-system-x86 mmdebstrap e2fsprogs
packages-test: vmtest ## Test the packages: the guest of vmtest, lintian, rpm; skips what is not there
	cd deploy/packaging && $(GO) mod tidy -diff && $(GO) vet . && $(GO) test -timeout 5m .
	@if command -v lintian >/dev/null; then lintian --allow-root --fail-on error,warning build/packages/*.deb && echo 'lintian: clean'; \
	else echo 'SKIP lintian: apt-get install lintian'; fi
	@if command -v rpm >/dev/null; then rpm -K --nosignature build/packages/*.rpm && rpm -qpl build/packages/gpreempt-*.rpm | grep -qx /usr/bin/gpreemptd; \
	else echo 'SKIP rpm: apt-get install rpm'; fi

# apt-get install -y --no-install-recommends python3-protobuf python3-pytest python3-grpcio python3-fastapi python3-httpx python3-uvicorn mypy python3-pip python3-setuptools python3-wheel
PYTHON ?= /usr/bin/python3
PYTHON_TEST = cd bindings/python && PYTHONDONTWRITEBYTECODE=1 GPREEMPT_BUILD='$(CURDIR)/build'
python-test: ## Test the Python client on a simulated machine, and check its types; skips what is not installed
	@if ! $(PYTHON) -c 'import google.protobuf, pytest' 2>/dev/null; then \
		echo 'SKIP: the tests of the Python client need python3-protobuf and python3-pytest'; \
	else set -e; $(GO) build $(BUILDFLAGS) -o build/ ./emu/cmd/kfdemu; \
		if $(PYTHON) -m mypy --version >/dev/null 2>&1; then (cd bindings/python && $(PYTHON) -m mypy --cache-dir='$(CURDIR)/build/mypy'); \
		else echo 'SKIP types: mypy is not installed'; fi; \
		$(PYTHON_TEST) $(PYTHON) -m pytest -q -rs; fi

FORKS ?= 10000
python-soak: ## Fork and announce FORKS times, from threads too, with the Python client: no lease may be left
	$(GO) build $(BUILDFLAGS) -o build/ ./emu/cmd/kfdemu
	$(PYTHON_TEST) GPREEMPT_FORKS=$(FORKS) $(PYTHON) -m pytest -q -s tests/test_soak.py

python-bench: ## Measure the Python client beside a bare grpcio call, and how soon protection is back after an outage of 30 s
	$(GO) build $(BUILDFLAGS) -o build/ ./emu/cmd/kfdemu
	$(PYTHON_TEST) $(PYTHON) tests/bench.py

clean: ## Remove what build and dist made
	rm -rf build dist
