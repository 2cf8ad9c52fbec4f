package kfd

import "fmt"

// Request is an ioctl request number: direction<<30 | size<<16 | 'K'<<8 | number.
// Direction is 1 to the kernel, 2 from it, 3 both. The driver selects the handler by the
// number alone; size is the number of bytes that it copies.
type Request uint32

// The request numbers of kfd_ioctl.h (AMDKFD_IOC_*) of the calls that this package makes, Linux 6.12
// and 7.2, 64 bits.
const (
	ReqGetVersion Request = 0x80084B01
	ReqSMIEvents  Request = 0xC0084B1F
	ReqCRIUOp     Request = 0xC0384B22
	ReqDbgTrap    Request = 0xC0204B26
)

// requestNames has the names of the header without AMDKFD_IOC_, by number.
var requestNames = [...]string{
	0x01: "GET_VERSION", "CREATE_QUEUE", "DESTROY_QUEUE", "SET_MEMORY_POLICY", "GET_CLOCK_COUNTERS", "GET_PROCESS_APERTURES",
	0x07: "UPDATE_QUEUE", "CREATE_EVENT", "DESTROY_EVENT", "SET_EVENT", "RESET_EVENT", "WAIT_EVENTS",
	0x11: "SET_SCRATCH_BACKING_VA", "GET_TILE_CONFIG", "SET_TRAP_HANDLER", "GET_PROCESS_APERTURES_NEW", "ACQUIRE_VM",
	0x16: "ALLOC_MEMORY_OF_GPU", "FREE_MEMORY_OF_GPU", "MAP_MEMORY_TO_GPU", "UNMAP_MEMORY_FROM_GPU",
	0x1A: "SET_CU_MASK", "GET_QUEUE_WAVE_STATE", "GET_DMABUF_INFO", "IMPORT_DMABUF", "ALLOC_QUEUE_GWS", "SMI_EVENTS",
	0x20: "SVM", "SET_XNACK_MODE", "CRIU_OP", "AVAILABLE_MEMORY", "EXPORT_DMABUF", "RUNTIME_ENABLE", "DBG_TRAP",
	0x27: "CREATE_PROCESS", "PROFILER",
}

// Number returns the part by which the driver selects the handler.
func (r Request) Number() uint8 { return uint8(r) }

// Size returns the size of the request's structure in bytes.
func (r Request) Size() int { return int(r >> 16 & 0x3fff) }

// String returns the header's name without AMDKFD_IOC_ or KFD_.
func (r Request) String() string {
	if n := int(r.Number()); r>>8&0xff == 'K' && n < len(requestNames) && requestNames[n] != "" {
		return requestNames[n]
	}
	return fmt.Sprintf("request(%#x)", uint32(r))
}
