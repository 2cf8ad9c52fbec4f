// Package nvrm is the part of the interface of NVIDIA's resource manager (RM) that shows which
// processes have channels on which GPUs, and that disables and enables channels. It is experimental:
// the interface is not a documented ABI, so driver versions whose source was not read are refused.
//
// Names and layouts are those of the public headers of NVIDIA/open-gpu-kernel-modules; the comment of
// each names the file. Everything goes through copies of a process's own descriptors of
// /dev/nvidiactl: RM ties a client to the open file (rmclientValidate_IMPL), so that a copy acts
// as that client and as no other. A copy keeps the client and its memory alive after the process
// has exited: close it soon.
package nvrm

import (
	"fmt"
	"structs"
)

// Handle names a client, or an object of one.
type Handle uint32

func (h Handle) String() string { return fmt.Sprintf("%#x", uint32(h)) }

// Class is the class of an object.
type Class uint32

// Classes of objects (src/common/sdk/nvidia/inc/class). The classes of channels, compute engines
// and copy engines change with the architecture; IsChannel and IsCompute know them.
const (
	ClassRoot         Class = 0x41   // NV01_ROOT_CLIENT
	ClassDevice       Class = 0x80   // NV01_DEVICE_0
	ClassSubdevice    Class = 0x2080 // NV20_SUBDEVICE_0
	ClassGroup        Class = 0xa06c // KEPLER_CHANNEL_GROUP_A
	ClassConfidential Class = 0xcb33 // NV_CONFIDENTIAL_COMPUTE, below a client
)

// IsChannel reports whether c is a channel: VOLTA_CHANNEL_GPFIFO_A to BLACKWELL_CHANNEL_GPFIFO_B.
func (c Class) IsChannel() bool { return c&0xff == 0x6f && c >= 0xc36f && c <= 0xca6f }

// IsCompute reports whether c is a compute engine: VOLTA_COMPUTE_A to BLACKWELL_COMPUTE_B.
func (c Class) IsCompute() bool { return c&0xff == 0xc0 && c >= 0xc3c0 && c <= 0xcec0 }

// Command is a control call.
type Command uint32

// The control calls that are used.
const (
	GetHandleInfo   Command = 0xd02      // NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO, ctrl0000client.h
	GetGPUID        Command = 0x20800142 // NV2080_CTRL_CMD_GPU_GET_ID, ctrl2080gpu.h
	DisableChannels Command = 0x2080110b // NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, ctrl2080fifo.h
	GetConfidential Command = 0xcb330101 // NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES, ctrlcb33.h
)

// Status is NV_STATUS: 0 is success. It is an error.
type Status uint32

// Statuses (nvstatuscodes.h).
const (
	OK               Status = 0
	NotPermitted     Status = 0x1b // NV_ERR_INSUFFICIENT_PERMISSIONS
	InvalidStruct    Status = 0x3a // NV_ERR_INVALID_PARAM_STRUCT
	InvalidChannel   Status = 0x21 // NV_ERR_INVALID_CHANNEL
	InvalidClass     Status = 0x22 // NV_ERR_INVALID_CLASS
	InvalidClient    Status = 0x23 // NV_ERR_INVALID_CLIENT
	InvalidObject    Status = 0x33 // NV_ERR_INVALID_OBJECT_HANDLE
	InvalidObjectOld Status = 0x35 // NV_ERR_INVALID_OBJECT_OLD
	NotSupported     Status = 0x56 // NV_ERR_NOT_SUPPORTED
	ObjectNotFound   Status = 0x57 // NV_ERR_OBJECT_NOT_FOUND
	InvalidArgument  Status = 0x1f // NV_ERR_INVALID_ARGUMENT
	GPUIsLost        Status = 0x0f // NV_ERR_GPU_IS_LOST
	Timeout          Status = 0x65 // NV_ERR_TIMEOUT
	ResetRequired    Status = 0x62 // NV_ERR_RESET_REQUIRED
	GPUInReset       Status = 0x10 // NV_ERR_GPU_IN_FULLCHIP_RESET
)

var statusNames = map[Status]string{
	NotPermitted: "INSUFFICIENT_PERMISSIONS", InvalidChannel: "INVALID_CHANNEL", InvalidClass: "INVALID_CLASS", InvalidClient: "INVALID_CLIENT",
	InvalidObject: "INVALID_OBJECT_HANDLE", InvalidObjectOld: "INVALID_OBJECT_OLD", NotSupported: "NOT_SUPPORTED", ObjectNotFound: "OBJECT_NOT_FOUND",
	InvalidArgument: "INVALID_ARGUMENT", InvalidStruct: "INVALID_PARAM_STRUCT", GPUIsLost: "GPU_IS_LOST", Timeout: "TIMEOUT", ResetRequired: "RESET_REQUIRED",
}

func (s Status) Error() string {
	if name, known := statusNames[s]; known {
		return "RM status " + name
	}
	return fmt.Sprintf("RM status %#x", uint32(s))
}

// Hardware reports whether the status says that the GPU itself failed.
func (s Status) Hardware() bool {
	return s == GPUIsLost || s == Timeout || s == ResetRequired || s == GPUInReset
}

// Numbers of ioctls of type 'F' (nv_escape.h).
const (
	escControl = 0x2a // NV_ESC_RM_CONTROL
	escAlloc   = 0x2b // NV_ESC_RM_ALLOC
)

// nvos54 is NVOS54_PARAMETERS (nvos.h), the argument of NV_ESC_RM_CONTROL.
type nvos54 struct {
	_          structs.HostLayout
	Client     Handle
	Object     Handle
	Command    Command
	Flags      uint32
	Params     uint64
	ParamsSize uint32
	Status     Status
}

// nvos64 is NVOS64_PARAMETERS (nvos.h), the argument of NV_ESC_RM_ALLOC.
type nvos64 struct {
	_          structs.HostLayout
	Root       Handle
	Parent     Handle
	New        Handle
	Class      Class
	Params     uint64
	Rights     uint64
	ParamsSize uint32
	Flags      uint32
	Status     Status
	_          uint32
}

// HandleInfo is NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS (ctrl0000client.h).
type HandleInfo struct {
	_      structs.HostLayout
	Object Handle
	Index  uint32
	// Result is a union: the lower 32 bits for a handle.
	Result uint64
}

// Values of HandleInfo.Index.
const (
	IndexParent = 1
	IndexClass  = 2
)

// GPUIDInfo is NV2080_CTRL_GPU_GET_ID_PARAMS (ctrl2080gpu.h).
type GPUIDInfo struct {
	_   structs.HostLayout
	GPU uint32
}

// MaxChannels is the largest number of channels of one DisableList.
const MaxChannels = 64

// DisableList is NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS (ctrl2080fifo.h).
type DisableList struct {
	_       structs.HostLayout
	Disable uint8
	_       [3]uint8
	Number  uint32
	// OnlyScheduling leaves a state that enabling does not undo: never set it.
	OnlyScheduling uint8
	RewindGPPut    uint8
	_              [6]uint8
	// PreemptEvent is for the kernel only; anything but 0 is refused.
	PreemptEvent uint64
	Clients      [MaxChannels]Handle
	Channels     [MaxChannels]Handle
}

// Confidential is NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES_PARAMS (ctrlcb33.h). The last
// three are 0 for off.
type Confidential struct {
	_                           structs.HostLayout
	CPU, GPUs, Environment      uint8
	Feature, DevTools, MultiGPU uint8
}
