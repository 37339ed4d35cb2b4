//! What is used of libibverbs: its functions, found when it is loaded, and its structures.
//!
//! Written by hand after rdma-core's `infiniband/verbs.h`, whose layouts are a stable interface
//! (`IBVERBS_1.1` since 2006); the assertions at the end hold the numbers that a C compiler gives
//! for the header of rdma-core 44 on a 64-bit machine. Posting and polling are inline functions in
//! C, which call through [`ContextOps`]; so do we.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::error::IbverbsError;

/// A device that has not been opened. Only the library looks inside.
#[repr(C)]
pub(super) struct Device {
    _opaque: [u8; 0],
}

/// `ibv_context`, up to what is used.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut Device,
    pub(super) ops: ContextOps,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
}

/// A slot of the table that is not used.
type Unused = *mut c_void;

/// `ibv_context_ops`: what each driver does for itself, without the library in between.
#[repr(C)]
pub(super) struct ContextOps {
    _before_poll_cq: [Unused; 11],
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(super) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _before_post_srq_recv: [Unused; 7],
    pub(super) post_srq_recv:
        Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _before_post_send: [Unused; 4],
    pub(super) post_send:
        Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(super) post_recv:
        Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _after_post_recv: [Unused; 5],
}

#[cfg(test)]
impl ContextOps {
    pub(super) const EMPTY: Self = Self {
        _before_poll_cq: [std::ptr::null_mut(); 11],
        poll_cq: None,
        req_notify_cq: None,
        _before_post_srq_recv: [std::ptr::null_mut(); 7],
        post_srq_recv: None,
        _before_post_send: [std::ptr::null_mut(); 4],
        post_send: None,
        post_recv: None,
        _after_post_recv: [std::ptr::null_mut(); 5],
    };
}

#[repr(C)]
pub(super) struct DeviceAttr {
    pub(super) fw_ver: [u8; 64],
    pub(super) node_guid: u64,
    pub(super) sys_image_guid: u64,
    pub(super) max_mr_size: u64,
    pub(super) page_size_cap: u64,
    pub(super) vendor_id: u32,
    pub(super) vendor_part_id: u32,
    pub(super) hw_ver: u32,
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    pub(super) device_cap_flags: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    pub(super) max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    pub(super) max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    pub(super) max_ee_rd_atom: c_int,
    pub(super) max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    pub(super) max_ee_init_rd_atom: c_int,
    pub(super) atomic_cap: c_int,
    pub(super) max_ee: c_int,
    pub(super) max_rdd: c_int,
    pub(super) max_mw: c_int,
    pub(super) max_raw_ipv6_qp: c_int,
    pub(super) max_raw_ethy_qp: c_int,
    pub(super) max_mcast_grp: c_int,
    pub(super) max_mcast_qp_attach: c_int,
    pub(super) max_total_mcast_qp_attach: c_int,
    pub(super) max_ah: c_int,
    pub(super) max_fmr: c_int,
    pub(super) max_map_per_fmr: c_int,
    pub(super) max_srq: c_int,
    pub(super) max_srq_wr: c_int,
    pub(super) max_srq_sge: c_int,
    pub(super) max_pkeys: u16,
    pub(super) local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

/// `ibv_port_attr`. The exported `ibv_query_port` fills the older, shorter structure that ends
/// before `port_cap_flags2`; C's inline function reaches the rest by another way. None of it is
/// used here, so the exported function, given the longer structure, is right with both.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct PortAttr {
    pub(super) state: c_int,
    pub(super) max_mtu: c_int,
    pub(super) active_mtu: c_int,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    pub(super) bad_pkey_cntr: u32,
    pub(super) qkey_viol_cntr: u32,
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) lmc: u8,
    pub(super) max_vl_num: u8,
    pub(super) sm_sl: u8,
    pub(super) subnet_timeout: u8,
    pub(super) init_type_reply: u8,
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    pub(super) phys_state: u8,
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    pub(super) port_cap_flags2: u16,
}

pub(super) const PORT_ACTIVE: c_int = 4;
/// 0, unspecified, is what devices say that are of neither, as AWS's EFA.
pub(super) const LINK_LAYER_INFINIBAND: u8 = 1;
pub(super) const LINK_LAYER_ETHERNET: u8 = 2;

/// `union ibv_gid`: network byte order, aligned as its 64-bit halves.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(8))]
pub(super) struct Gid(pub(super) [u8; 16]);

/// `ibv_pd`: only the library looks inside.
#[repr(C)]
pub(super) struct Pd {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct Mr {
    pub(super) context: *mut Context,
    pub(super) pd: *mut Pd,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `IBV_ACCESS_RELAXED_ORDERING`, the first of the flags that a device may ignore.
pub(super) const ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;

#[repr(C)]
pub(super) struct CompChannel {
    pub(super) context: *mut Context,
    pub(super) fd: c_int,
    pub(super) refcnt: c_int,
}

/// `ibv_cq`, up to what is used.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
    pub(super) channel: *mut CompChannel,
    pub(super) cq_context: *mut c_void,
    pub(super) handle: u32,
    pub(super) cqe: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: u32,
    pub(super) opcode: u32,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    /// Network byte order. (Or the key that a SEND with invalidate named.)
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: c_uint,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

pub(super) const WC_RECV_RDMA_WITH_IMM: u32 = 129;
pub(super) const WC_WITH_IMM: c_uint = 1 << 1;
pub(super) const WC_WITH_INV: c_uint = 1 << 3;

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// `ibv_send_wr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut Self,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: u32,
    pub(super) send_flags: c_uint,
    /// Network byte order. (Or the key that a SEND invalidates, in the machine's.)
    pub(super) imm_data: u32,
    pub(super) wr: Wr,
    pub(super) _rest: [u64; 7],
}

/// What only some operations have: a union in C too.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union Wr {
    pub(super) rdma: Rdma,
    pub(super) atomic: Atomic,
    pub(super) ud: Ud,
}

/// Of a datagram.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Ud {
    pub(super) ah: *mut Ah,
    pub(super) remote_qpn: u32,
    pub(super) remote_qkey: u32,
}

/// `ibv_ah`: only the library looks inside.
#[repr(C)]
pub(super) struct Ah {
    _opaque: [u8; 0],
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Rdma {
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Atomic {
    pub(super) remote_addr: u64,
    pub(super) compare_add: u64,
    pub(super) swap: u64,
    pub(super) rkey: u32,
}

pub(super) const WR_RDMA_WRITE: u32 = 0;
pub(super) const WR_RDMA_WRITE_WITH_IMM: u32 = 1;
pub(super) const WR_SEND: u32 = 2;
pub(super) const WR_SEND_WITH_IMM: u32 = 3;
pub(super) const WR_RDMA_READ: u32 = 4;
pub(super) const WR_ATOMIC_CMP_AND_SWP: u32 = 5;
pub(super) const WR_ATOMIC_FETCH_AND_ADD: u32 = 6;
pub(super) const WR_SEND_WITH_INV: u32 = 9;

pub(super) const SEND_FENCE: c_uint = 1 << 0;
pub(super) const SEND_SIGNALED: c_uint = 1 << 1;
pub(super) const SEND_SOLICITED: c_uint = 1 << 2;
pub(super) const SEND_INLINE: c_uint = 1 << 3;

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut Self,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut Srq,
    pub(super) cap: QpCap,
    pub(super) qp_type: c_int,
    pub(super) sq_sig_all: c_int,
}

/// `ibv_srq`, up to what is used.
#[repr(C)]
pub(super) struct Srq {
    pub(super) context: *mut Context,
    pub(super) srq_context: *mut c_void,
}

#[repr(C)]
pub(super) struct SrqInitAttr {
    pub(super) srq_context: *mut c_void,
    pub(super) attr: SrqAttr,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct SrqAttr {
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) srq_limit: u32,
}

/// `IBV_SRQ_LIMIT` of `ibv_srq_attr_mask`.
pub(super) const SRQ_LIMIT: c_int = 1 << 1;

/// `IBV_QPT_RC`.
pub(super) const QP_TYPE_RC: c_int = 2;
/// `IBV_QPT_UD`.
pub(super) const QP_TYPE_UD: c_int = 4;

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct GlobalRoute {
    pub(super) dgid: Gid,
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct AhAttr {
    pub(super) grh: GlobalRoute,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_int,
    pub(super) cur_qp_state: c_int,
    pub(super) path_mtu: c_int,
    pub(super) path_mig_state: c_int,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `ibv_qp_attr_mask`.
pub(super) mod qp_mask {
    use std::ffi::c_int;

    pub(in super::super) const STATE: c_int = 1;
    pub(in super::super) const EN_SQD_ASYNC_NOTIFY: c_int = 1 << 2;
    pub(in super::super) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(in super::super) const PKEY_INDEX: c_int = 1 << 4;
    pub(in super::super) const PORT: c_int = 1 << 5;
    pub(in super::super) const QKEY: c_int = 1 << 6;
    pub(in super::super) const AV: c_int = 1 << 7;
    pub(in super::super) const PATH_MTU: c_int = 1 << 8;
    pub(in super::super) const TIMEOUT: c_int = 1 << 9;
    pub(in super::super) const RETRY_CNT: c_int = 1 << 10;
    pub(in super::super) const RNR_RETRY: c_int = 1 << 11;
    pub(in super::super) const RQ_PSN: c_int = 1 << 12;
    pub(in super::super) const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub(in super::super) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(in super::super) const SQ_PSN: c_int = 1 << 16;
    pub(in super::super) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(in super::super) const DEST_QPN: c_int = 1 << 20;
}

/// `ibv_qp`, up to what is used.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    pub(super) qp_context: *mut c_void,
    pub(super) pd: *mut Pd,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut Srq,
    pub(super) handle: u32,
    pub(super) qp_num: u32,
}

/// `ibv_async_event`. `element` is a union in C: which member counts depends on the type.
#[repr(C)]
pub(super) struct AsyncEvent {
    pub(super) element: *mut c_void,
    pub(super) event_type: u32,
}

pub(super) const EVENT_CQ_ERR: u32 = 0;
pub(super) const EVENT_QP_FATAL: u32 = 1;
pub(super) const EVENT_QP_REQ_ERR: u32 = 2;
pub(super) const EVENT_QP_ACCESS_ERR: u32 = 3;
pub(super) const EVENT_COMM_EST: u32 = 4;
pub(super) const EVENT_SQ_DRAINED: u32 = 5;
pub(super) const EVENT_DEVICE_FATAL: u32 = 8;
pub(super) const EVENT_PORT_ACTIVE: u32 = 9;
pub(super) const EVENT_PORT_ERR: u32 = 10;
pub(super) const EVENT_SRQ_ERR: u32 = 14;
pub(super) const EVENT_SRQ_LIMIT_REACHED: u32 = 15;
pub(super) const EVENT_QP_LAST_WQE_REACHED: u32 = 16;

/// The name to load. The number is that of the library's interface; a name without it belongs to
/// development packages.
const LIBRARY: &str = "libibverbs.so.1";

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The library's functions.
        pub(super) struct Library {
            $($(#[$doc])* pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Newer than the rest.
            pub(super) ibv_reg_mr_iova2:
                Option<unsafe extern "C" fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr>,
            /// Older than kernels that give a child process copies of registered pages.
            pub(super) ibv_fork_init: Option<unsafe extern "C" fn() -> c_int>,
            /// Keeps what the pointers point to. None in tests, whose functions are their own.
            pub(super) _library: Option<libloading::Library>,
        }

        impl Library {
            fn load_from(file: &str) -> Result<Self, IbverbsError> {
                // SAFETY: loading runs the library's initialisers, which are those of the system's
                // own RDMA library and have no demands.
                let library = unsafe { libloading::Library::new(file) }.map_err(|error| {
                    // The loader's words come after libloading's own.
                    let source = std::error::Error::source(&error);
                    let reason = source.map_or_else(|| error.to_string(), ToString::to_string);
                    IbverbsError::LibraryMissing { file: file.into(), reason }
                })?;
                // Symbols of this library have versions. A look-up without one finds the default,
                // which is the newest.
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the one that `infiniband/verbs.h` declares.
                        let found = unsafe { library.get(stringify!($name)) };
                        *found.map_err(|_| IbverbsError::Symbol(stringify!($name)))?
                    },)*
                    // SAFETY: as above.
                    ibv_reg_mr_iova2: unsafe { library.get("ibv_reg_mr_iova2") }
                        .ok()
                        .map(|found| *found),
                    // SAFETY: as above.
                    ibv_fork_init: unsafe { library.get("ibv_fork_init") }
                        .ok()
                        .map(|found| *found),
                    _library: Some(library),
                })
            }
        }
    };
}

functions! {
    ibv_get_device_list(*mut c_int) -> *mut *mut Device;
    ibv_free_device_list(*mut *mut Device);
    ibv_get_device_name(*mut Device) -> *const c_char;
    ibv_open_device(*mut Device) -> *mut Context;
    ibv_close_device(*mut Context) -> c_int;
    ibv_query_device(*mut Context, *mut DeviceAttr) -> c_int;
    ibv_query_port(*mut Context, u8, *mut PortAttr) -> c_int;
    ibv_query_gid(*mut Context, u8, c_int, *mut Gid) -> c_int;
    ibv_get_async_event(*mut Context, *mut AsyncEvent) -> c_int;
    ibv_ack_async_event(*mut AsyncEvent);
    ibv_alloc_pd(*mut Context) -> *mut Pd;
    ibv_dealloc_pd(*mut Pd) -> c_int;
    ibv_reg_mr(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    ibv_dereg_mr(*mut Mr) -> c_int;
    ibv_create_comp_channel(*mut Context) -> *mut CompChannel;
    ibv_destroy_comp_channel(*mut CompChannel) -> c_int;
    ibv_get_cq_event(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events(*mut Cq, c_uint);
    ibv_create_cq(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    ibv_destroy_cq(*mut Cq) -> c_int;
    ibv_create_ah(*mut Pd, *mut AhAttr) -> *mut Ah;
    ibv_destroy_ah(*mut Ah) -> c_int;
    ibv_create_srq(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    ibv_modify_srq(*mut Srq, *mut SrqAttr, c_int) -> c_int;
    ibv_destroy_srq(*mut Srq) -> c_int;
    ibv_create_qp(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    ibv_modify_qp(*mut Qp, *mut QpAttr, c_int) -> c_int;
    ibv_query_qp(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
    ibv_destroy_qp(*mut Qp) -> c_int;
}

impl Library {
    /// The library, loaded at the first call that can load it, and then for good: it starts
    /// drivers that are not made to be unloaded.
    pub(super) fn get() -> Result<&'static Self, IbverbsError> {
        static LOADED: OnceLock<Library> = OnceLock::new();
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        let library = Self::load_from(LIBRARY)?;
        if let Some(initialize) = library.ibv_fork_init {
            // Before the first registration. Without it, a child process on Linux before 5.12
            // takes away the pages that devices work on: the parent's next write makes a copy that
            // they do not know. Where the kernel copies for the child, it does nothing.
            //
            // SAFETY: takes nothing, and may be called any number of times.
            let code = unsafe { initialize() };
            if code != 0 {
                tracing::warn!("ibv_fork_init failed with error {code}: do not start processes");
            }
        }
        // Where another thread was first, the second copy is the same library, counted once more.
        Ok(LOADED.get_or_init(|| library))
    }
}

/// Layouts, as `sizeof` and `offsetof` of C say.
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::{align_of, offset_of, size_of};

    assert!(offset_of!(Context, ops) == 8);
    assert!(offset_of!(Context, cmd_fd) == 264);
    assert!(offset_of!(Context, async_fd) == 268);
    assert!(offset_of!(Context, num_comp_vectors) == 272);
    assert!(size_of::<ContextOps>() == 256);
    assert!(offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, req_notify_cq) == 96);
    assert!(offset_of!(ContextOps, post_srq_recv) == 160);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(offset_of!(ContextOps, post_recv) == 208);

    assert!(size_of::<DeviceAttr>() == 232);
    assert!(offset_of!(DeviceAttr, max_mr_size) == 80);
    assert!(offset_of!(DeviceAttr, vendor_id) == 96);
    assert!(offset_of!(DeviceAttr, max_qp) == 108);
    assert!(offset_of!(DeviceAttr, max_qp_wr) == 112);
    assert!(offset_of!(DeviceAttr, max_sge) == 120);
    assert!(offset_of!(DeviceAttr, max_cq) == 128);
    assert!(offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(offset_of!(DeviceAttr, max_mr) == 136);
    assert!(offset_of!(DeviceAttr, max_qp_rd_atom) == 144);
    assert!(offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156);
    assert!(offset_of!(DeviceAttr, atomic_cap) == 164);
    assert!(offset_of!(DeviceAttr, max_srq) == 212);
    assert!(offset_of!(DeviceAttr, max_pkeys) == 224);
    assert!(offset_of!(DeviceAttr, phys_port_cnt) == 227);

    assert!(size_of::<PortAttr>() == 52);
    assert!(offset_of!(PortAttr, active_mtu) == 8);
    assert!(offset_of!(PortAttr, gid_tbl_len) == 12);
    assert!(offset_of!(PortAttr, max_msg_sz) == 20);
    assert!(offset_of!(PortAttr, pkey_tbl_len) == 32);
    assert!(offset_of!(PortAttr, phys_state) == 45);
    assert!(offset_of!(PortAttr, link_layer) == 46);
    assert!(offset_of!(PortAttr, port_cap_flags2) == 48);

    assert!(size_of::<Gid>() == 16 && align_of::<Gid>() == 8);
    assert!(size_of::<Mr>() == 48);
    assert!(offset_of!(Mr, lkey) == 36);
    assert!(offset_of!(Mr, rkey) == 40);
    assert!(size_of::<CompChannel>() == 16);
    assert!(offset_of!(CompChannel, fd) == 8);
    assert!(offset_of!(Cq, cq_context) == 16);
    assert!(offset_of!(Cq, cqe) == 28);

    assert!(size_of::<Wc>() == 48);
    assert!(offset_of!(Wc, status) == 8);
    assert!(offset_of!(Wc, opcode) == 12);
    assert!(offset_of!(Wc, byte_len) == 20);
    assert!(offset_of!(Wc, imm_data) == 24);
    assert!(offset_of!(Wc, qp_num) == 28);
    assert!(offset_of!(Wc, src_qp) == 32);
    assert!(offset_of!(Wc, wc_flags) == 36);
    assert!(offset_of!(Wc, pkey_index) == 40);

    assert!(size_of::<Sge>() == 16);
    assert!(size_of::<SendWr>() == 128);
    assert!(offset_of!(SendWr, next) == 8);
    assert!(offset_of!(SendWr, sg_list) == 16);
    assert!(offset_of!(SendWr, num_sge) == 24);
    assert!(offset_of!(SendWr, opcode) == 28);
    assert!(offset_of!(SendWr, send_flags) == 32);
    assert!(offset_of!(SendWr, imm_data) == 36);
    assert!(offset_of!(SendWr, wr) == 40);
    assert!(offset_of!(SendWr, _rest) == 72);
    assert!(offset_of!(Rdma, rkey) == 8);
    assert!(offset_of!(Atomic, compare_add) == 8);
    assert!(offset_of!(Atomic, swap) == 16);
    assert!(offset_of!(Atomic, rkey) == 24);
    assert!(offset_of!(Ud, remote_qpn) == 8);
    assert!(offset_of!(Ud, remote_qkey) == 12);
    assert!(offset_of!(Rdma, rkey) == 8);
    assert!(size_of::<RecvWr>() == 32);
    assert!(offset_of!(RecvWr, sg_list) == 16);
    assert!(offset_of!(RecvWr, num_sge) == 24);

    assert!(offset_of!(Srq, srq_context) == 8);
    assert!(size_of::<SrqInitAttr>() == 24);
    assert!(offset_of!(SrqInitAttr, attr) == 8);
    assert!(size_of::<SrqAttr>() == 12);

    assert!(size_of::<QpCap>() == 20);
    assert!(size_of::<QpInitAttr>() == 64);
    assert!(offset_of!(QpInitAttr, cap) == 32);
    assert!(offset_of!(QpInitAttr, qp_type) == 52);
    assert!(offset_of!(QpInitAttr, sq_sig_all) == 56);
    assert!(size_of::<GlobalRoute>() == 24);
    assert!(size_of::<AhAttr>() == 32);
    assert!(offset_of!(AhAttr, dlid) == 24);
    assert!(offset_of!(AhAttr, is_global) == 29);
    assert!(offset_of!(AhAttr, port_num) == 30);
    assert!(size_of::<QpAttr>() == 144);
    assert!(offset_of!(QpAttr, path_mtu) == 8);
    assert!(offset_of!(QpAttr, rq_psn) == 20);
    assert!(offset_of!(QpAttr, qp_access_flags) == 32);
    assert!(offset_of!(QpAttr, cap) == 36);
    assert!(offset_of!(QpAttr, ah_attr) == 56);
    assert!(offset_of!(QpAttr, alt_ah_attr) == 88);
    assert!(offset_of!(QpAttr, pkey_index) == 120);
    assert!(offset_of!(QpAttr, max_rd_atomic) == 126);
    assert!(offset_of!(QpAttr, min_rnr_timer) == 128);
    assert!(offset_of!(QpAttr, port_num) == 129);
    assert!(offset_of!(QpAttr, alt_timeout) == 134);
    assert!(offset_of!(QpAttr, rate_limit) == 136);
    assert!(offset_of!(Qp, qp_num) == 52);

    assert!(size_of::<AsyncEvent>() == 16);
    assert!(offset_of!(AsyncEvent, event_type) == 8);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_what_to_do() {
        let error = Library::load_from("libmillstream-none.so.1").err().unwrap();
        let text = error.to_string();
        assert!(text.contains("libmillstream-none.so.1"), "{text}");
        assert!(text.contains("libibverbs1"), "{text}");
        // Once from us, once from the loader.
        assert_eq!(text.matches("libmillstream-none.so.1").count(), 2, "{text}");
    }

    #[test]
    fn another_library_is_an_error_that_names_the_symbol() {
        let error = Library::load_from("libc.so.6").err().unwrap();
        assert!(matches!(error, IbverbsError::Symbol("ibv_get_device_list")), "{error}");
    }
}
