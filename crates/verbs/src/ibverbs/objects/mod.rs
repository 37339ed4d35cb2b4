//! The library's objects as owners that destroy what they own, each keeping alive what it is made
//! of: a queue pair its queues and domain, a region its domain, all of them the context. Every
//! call of the library is here.
//!
//! Whatever is called, the argument is a live object that its owner here holds, as the library
//! asks; that is the reason that makes most calls sound, and `SAFETY: live` names it.

mod address_handle;
mod queue_pair;
mod shared_receive_queue;

pub(super) use address_handle::AddressHandle;
pub(super) use queue_pair::QueuePair;
pub(super) use shared_receive_queue::SharedReceiveQueue;

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use millstream_roce::AsyncEvent;
use millstream_wire::Qpn;

use super::error::IbverbsError;
use super::ffi::{self, Library};

/// An error number, as a call returned or left it.
pub(super) type Errno = i32;

/// Calls that return 0 or an error number, or -1 and leave the number in `errno`.
fn check(result: c_int) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        -1 => Err(last_errno()),
        code => Err(code.saturating_abs()),
    }
}

fn last_errno() -> Errno {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn created<T>(object: *mut T) -> Result<NonNull<T>, Errno> {
    NonNull::new(object).ok_or_else(last_errno)
}

/// Nothing is left to do about an object that cannot be destroyed, but someone should know.
fn destroyed(call: &'static str, result: c_int) {
    if let Err(code) = check(result) {
        tracing::error!("{call} failed: {}", io::Error::from_raw_os_error(code));
    }
}

/// The system's devices.
pub(super) struct DeviceList {
    library: &'static Library,
    devices: NonNull<*mut ffi::Device>,
    count: usize,
}

impl DeviceList {
    pub(super) fn get() -> Result<Self, IbverbsError> {
        let library = Library::get()?;
        let mut count = 0;
        // SAFETY: `count` is a place for the number.
        let list = created(unsafe { (library.ibv_get_device_list)(&raw mut count) });
        match list {
            Ok(devices) => {
                Ok(Self { library, devices, count: usize::try_from(count).unwrap_or(0) })
            }
            // The kernel has no RDMA at all.
            Err(libc::ENOSYS) => Err(IbverbsError::NoDevice),
            Err(code) => Err(IbverbsError::System {
                device: "this machine".into(),
                call: "ibv_get_device_list",
                source: io::Error::from_raw_os_error(code),
            }),
        }
    }

    pub(super) fn names(&self) -> Vec<String> {
        (0..self.count).map(|index| self.name(index)).collect()
    }

    fn device(&self, index: usize) -> *mut ffi::Device {
        assert!(index < self.count);
        // SAFETY: the list has `count` entries, and lives as long as `self`.
        unsafe { *self.devices.as_ptr().add(index) }
    }

    fn name(&self, index: usize) -> String {
        // SAFETY: live. The name is a string that ends with a zero, inside the device.
        let name =
            unsafe { CStr::from_ptr((self.library.ibv_get_device_name)(self.device(index))) };
        name.to_string_lossy().into_owned()
    }

    /// Opens the device of this index, below the number of names.
    pub(super) fn open(&self, index: usize) -> Result<Context, Errno> {
        let library = self.library;
        // SAFETY: live. An open device does not need the list any more.
        let context = created(unsafe { (library.ibv_open_device)(self.device(index)) })?;
        Ok(Context { library, context })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: live, and not used after this.
        unsafe { (self.library.ibv_free_device_list)(self.devices.as_ptr()) }
    }
}

/// An open device.
pub(super) struct Context {
    library: &'static Library,
    context: NonNull<ffi::Context>,
}

// SAFETY: all verbs may be called by any thread at any time (ibv_open_device's documentation and
// rdma-core's Documentation/libibverbs.md: "libibverbs is thread safe").
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Something that happened to a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum DeviceEvent {
    /// To the completion queue with this number.
    CompletionQueueError(u32),
    /// To the queue pair that the event names.
    QueuePair(AsyncEvent),
    /// To the shared receive queue with this number: it does not work any more.
    SharedReceivesError(u32),
    /// To the shared receive queue with this number: its limit was reached.
    SharedReceivesLimit(u32),
    DeviceFatal,
    /// The port with this number works, or does not.
    Port(u8, bool),
    /// What needs no reaction: addresses and connections that change.
    Other(u32),
}

impl Context {
    /// # Safety
    /// `context` is one of `library`, open, and given to nothing else.
    #[cfg(test)]
    pub(super) unsafe fn of(library: &'static Library, context: NonNull<ffi::Context>) -> Self {
        Self { library, context }
    }

    pub(super) fn attributes(&self) -> Result<ffi::DeviceAttr, Errno> {
        let mut attributes = MaybeUninit::zeroed();
        // SAFETY: live; the call fills a structure of this layout.
        check(unsafe {
            (self.library.ibv_query_device)(self.context.as_ptr(), attributes.as_mut_ptr())
        })?;
        // SAFETY: zeroed and then filled; every bit pattern is a value of its integers.
        Ok(unsafe { attributes.assume_init() })
    }

    pub(super) fn port(&self, port: u8) -> Result<ffi::PortAttr, Errno> {
        let mut attributes = MaybeUninit::zeroed();
        // SAFETY: live; the call fills at most a structure of this layout.
        check(unsafe {
            (self.library.ibv_query_port)(self.context.as_ptr(), port, attributes.as_mut_ptr())
        })?;
        // SAFETY: zeroed and then filled; every bit pattern is a value of its integers.
        Ok(unsafe { attributes.assume_init() })
    }

    pub(super) fn gid(&self, port: u8, index: u8) -> Result<[u8; 16], Errno> {
        let mut gid = ffi::Gid::default();
        // SAFETY: live; `gid` is a place for the result.
        check(unsafe {
            let context = self.context.as_ptr();
            (self.library.ibv_query_gid)(context, port, index.into(), &raw mut gid)
        })?;
        Ok(gid.0)
    }

    /// Where [`Context::next_event`] has something when it is readable.
    pub(super) fn event_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: live, and with it the descriptor, as long as `self`. The field is set once,
        // when the device is opened.
        unsafe { BorrowedFd::borrow_raw((*self.context.as_ptr()).async_fd) }
    }

    /// Takes the next event and returns what `look_up` makes of it; `None` when there is none now,
    /// on a descriptor that does not block. While `look_up` runs, what the event is of exists, and
    /// its number means nothing else: its destruction waits for the acknowledgement. So it must not
    /// destroy anything itself.
    pub(super) fn next_event<T>(
        &self,
        look_up: impl FnOnce(DeviceEvent) -> T,
    ) -> Result<Option<T>, Errno> {
        let mut event = ffi::AsyncEvent { element: ptr::null_mut(), event_type: 0 };
        // SAFETY: live; `event` is a place for the result.
        let got = check(unsafe {
            (self.library.ibv_get_async_event)(self.context.as_ptr(), &raw mut event)
        });
        match got {
            Ok(()) => {}
            Err(libc::EAGAIN | libc::EINTR) => return Ok(None),
            Err(code) => return Err(code),
        }
        let what = match event.event_type {
            ffi::EVENT_CQ_ERR => {
                // SAFETY: for this type the element is a completion queue. Its destruction waits
                // for the acknowledgement below, so it is live.
                let context = unsafe { (*event.element.cast::<ffi::Cq>()).cq_context };
                DeviceEvent::CompletionQueueError(context.addr() as u32)
            }
            ffi::EVENT_QP_FATAL
            | ffi::EVENT_QP_REQ_ERR
            | ffi::EVENT_QP_ACCESS_ERR
            | ffi::EVENT_COMM_EST
            | ffi::EVENT_SQ_DRAINED
            | ffi::EVENT_QP_LAST_WQE_REACHED => {
                // SAFETY: for these types the element is a queue pair. Its destruction waits for
                // the acknowledgement below, so it is live.
                let qpn = Qpn::new(unsafe { (*event.element.cast::<ffi::Qp>()).qp_num });
                DeviceEvent::QueuePair(match event.event_type {
                    ffi::EVENT_QP_REQ_ERR => AsyncEvent::QueuePairRequestError(qpn),
                    ffi::EVENT_QP_ACCESS_ERR => AsyncEvent::QueuePairAccessError(qpn),
                    ffi::EVENT_COMM_EST => AsyncEvent::CommunicationEstablished(qpn),
                    ffi::EVENT_SQ_DRAINED => AsyncEvent::SendQueueDrained(qpn),
                    ffi::EVENT_QP_LAST_WQE_REACHED => AsyncEvent::LastReceiveRequest(qpn),
                    _ => AsyncEvent::QueuePairFatal(qpn),
                })
            }
            ffi::EVENT_SRQ_ERR | ffi::EVENT_SRQ_LIMIT_REACHED => {
                // SAFETY: for these types the element is a shared receive queue. Its destruction
                // waits for the acknowledgement below, so it is live.
                let context = unsafe { (*event.element.cast::<ffi::Srq>()).srq_context };
                let number = context.addr() as u32;
                match event.event_type {
                    ffi::EVENT_SRQ_ERR => DeviceEvent::SharedReceivesError(number),
                    _ => DeviceEvent::SharedReceivesLimit(number),
                }
            }
            ffi::EVENT_DEVICE_FATAL => DeviceEvent::DeviceFatal,
            ffi::EVENT_PORT_ACTIVE | ffi::EVENT_PORT_ERR => {
                // SAFETY: for these types the union is the port's number, a C `int`.
                let number = unsafe { *(&raw const event.element).cast::<c_int>() };
                DeviceEvent::Port(number as u8, event.event_type == ffi::EVENT_PORT_ACTIVE)
            }
            other => DeviceEvent::Other(other),
        };
        let found = look_up(what);
        // SAFETY: the event was got above and is acknowledged once.
        unsafe { (self.library.ibv_ack_async_event)(&raw mut event) };
        Ok(Some(found))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: live, and nothing uses it any more: all that does holds it.
        destroyed("ibv_close_device", unsafe {
            (self.library.ibv_close_device)(self.context.as_ptr())
        });
    }
}

/// A protection domain.
pub(super) struct Domain {
    context: Arc<Context>,
    domain: NonNull<ffi::Pd>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Domain {}
// SAFETY: as for `Context`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn allocate(context: &Arc<Context>) -> Result<Self, Errno> {
        // SAFETY: live.
        let domain = created(unsafe { (context.library.ibv_alloc_pd)(context.context.as_ptr()) })?;
        Ok(Self { context: Arc::clone(context), domain })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: live, and nothing uses it any more: all that does holds it.
        destroyed("ibv_dealloc_pd", unsafe {
            (self.context.library.ibv_dealloc_pd)(self.domain.as_ptr())
        });
    }
}

/// Registered memory.
pub(super) struct Region {
    domain: Arc<Domain>,
    region: NonNull<ffi::Mr>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Region {}
// SAFETY: as for `Context`.
unsafe impl Sync for Region {}

impl Region {
    /// # Safety
    /// The device uses the bytes until the region is dropped: see
    /// [`crate::ProtectionDomain::register_memory`].
    pub(super) unsafe fn register(
        domain: &Arc<Domain>,
        address: *mut u8,
        length: usize,
        access: c_uint,
    ) -> Result<Self, Errno> {
        let library = domain.context.library;
        let (pd, start) = (domain.domain.as_ptr(), address.cast::<c_void>());
        let optional = access & ffi::ACCESS_RELAXED_ORDERING;
        let region = match library.ibv_reg_mr_iova2 {
            Some(register) if optional != 0 => {
                // SAFETY: live; the caller vouches for the memory.
                unsafe { register(pd, start, length, address.addr() as u64, access) }
            }
            // SAFETY: as above.
            _ => unsafe { (library.ibv_reg_mr)(pd, start, length, (access & !optional) as c_int) },
        };
        Ok(Self { domain: Arc::clone(domain), region: created(region)? })
    }

    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: live; set once, at registration.
        unsafe { (*self.region.as_ptr()).lkey }
    }

    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: live; set once, at registration.
        unsafe { (*self.region.as_ptr()).rkey }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        for attempt in 1.. {
            // SAFETY: live, and not used after this succeeds. The device forgets the memory first.
            let result =
                check(unsafe { (self.domain.context.library.ibv_dereg_mr)(self.region.as_ptr()) });
            let Err(code) = result else { return };
            match after_refusal(code, attempt) {
                AfterRefusal::Gone => return destroyed("ibv_dereg_mr", code),
                // What holds it back is in the device, and says nothing when it is done.
                AfterRefusal::Again => std::thread::sleep(Duration::from_millis(1)),
                AfterRefusal::Abort => {
                    // The owner is about to give the memory to something else.
                    let error = io::Error::from_raw_os_error(code);
                    eprintln!("ibv_dereg_mr failed: {error}: a device can still write to memory");
                    std::process::abort();
                }
            }
        }
    }
}

/// What to do about memory that a device was not made to forget.
#[derive(Debug, Eq, PartialEq)]
enum AfterRefusal {
    /// Nothing: the device was taken away, and the kernel has undone its registrations.
    Gone,
    /// Try again: a call is in the way, or a signal was.
    Again,
    /// Nothing helps.
    Abort,
}

/// What to do when deregistering was refused with this error, so many times in a row.
fn after_refusal(code: Errno, attempts: u32) -> AfterRefusal {
    match code {
        libc::EIO | libc::ENODEV => AfterRefusal::Gone,
        libc::EBUSY | libc::EINTR | libc::EAGAIN if attempts < 1000 => AfterRefusal::Again,
        _ => AfterRefusal::Abort,
    }
}

/// Where completion queues announce that they have something.
pub(super) struct Channel {
    context: Arc<Context>,
    channel: NonNull<ffi::CompChannel>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Channel {}
// SAFETY: as for `Context`.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn create(context: &Arc<Context>) -> Result<Self, Errno> {
        // SAFETY: live.
        let channel = created(unsafe {
            (context.library.ibv_create_comp_channel)(context.context.as_ptr())
        })?;
        Ok(Self { context: Arc::clone(context), channel })
    }

    /// Where [`Channel::next`] has something when it is readable.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: live, and with it the descriptor, as long as `self`. The field is set once.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }

    /// Takes the next announcement, of the queue made with this number; `None` when there is none
    /// now, on a descriptor that does not block.
    pub(super) fn next(&self) -> Result<Option<u32>, Errno> {
        let library = self.context.library;
        let (mut queue, mut number) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: live; the others are places for the results.
        let got = check(unsafe {
            (library.ibv_get_cq_event)(self.channel.as_ptr(), &raw mut queue, &raw mut number)
        });
        match got {
            Ok(()) => {
                // SAFETY: the queue is live: its destruction waits for this.
                unsafe { (library.ibv_ack_cq_events)(queue, 1) };
                Ok(Some(number.addr() as u32))
            }
            Err(libc::EAGAIN | libc::EINTR) => Ok(None),
            Err(code) => Err(code),
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: live, and nothing uses it any more: all that does holds it.
        destroyed("ibv_destroy_comp_channel", unsafe {
            (self.context.library.ibv_destroy_comp_channel)(self.channel.as_ptr())
        });
    }
}

/// Makes a descriptor of the library return at once when there is nothing.
pub(super) fn set_nonblocking(descriptor: BorrowedFd<'_>) -> Result<(), Errno> {
    let raw = descriptor.as_raw_fd();
    // SAFETY: these commands take no pointer, and the descriptor is open.
    check(unsafe {
        match libc::fcntl(raw, libc::F_GETFL) {
            -1 => -1,
            flags => libc::fcntl(raw, libc::F_SETFL, flags | libc::O_NONBLOCK),
        }
    })
}

/// Waits until one of the descriptors has something to read, or is broken; returns which.
/// With `block` false, only looks.
pub(super) fn readable<const N: usize>(
    descriptors: [RawFd; N],
    block: bool,
) -> Result<[bool; N], Errno> {
    let mut set = descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    // SAFETY: `set` is a table of N entries. A descriptor that is not open is reported, not used.
    match unsafe { libc::poll(set.as_mut_ptr(), N as libc::nfds_t, if block { -1 } else { 0 }) } {
        -1 if last_errno() == libc::EINTR => Ok([false; N]),
        -1 => Err(last_errno()),
        _ => Ok(set.map(|entry| entry.revents != 0)),
    }
}

/// A completion queue.
pub(super) struct CompletionQueue {
    channel: Arc<Channel>,
    queue: NonNull<ffi::Cq>,
}

// SAFETY: as for `Context`.
unsafe impl Send for CompletionQueue {}
// SAFETY: as for `Context`.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Makes a queue that announces itself by `number`.
    pub(super) fn create(
        channel: &Arc<Channel>,
        capacity: c_int,
        number: u32,
    ) -> Result<Self, Errno> {
        let context = &channel.context;
        // SAFETY: live; the number is not a pointer to the library, only handed back.
        let queue = created(unsafe {
            (context.library.ibv_create_cq)(
                context.context.as_ptr(),
                capacity,
                ptr::without_provenance_mut(number as usize),
                channel.channel.as_ptr(),
                0,
            )
        })?;
        Ok(Self { channel: Arc::clone(channel), queue })
    }

    /// Takes completions; returns those that there are, in order.
    pub(super) fn poll<'a>(
        &self,
        out: &'a mut [MaybeUninit<ffi::Wc>],
    ) -> Result<&'a [ffi::Wc], Errno> {
        let poll = self.ops().poll_cq.ok_or(libc::ENOSYS)?;
        let limit = c_int::try_from(out.len()).unwrap_or(c_int::MAX);
        // SAFETY: live; `out` has room for `limit` entries.
        let count = unsafe { poll(self.queue.as_ptr(), limit, out.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| libc::EIO)?.min(out.len());
        // SAFETY: so many entries were written.
        Ok(unsafe { std::slice::from_raw_parts(out.as_ptr().cast(), count) })
    }

    /// Asks for one announcement, when the next completion is added; or the next that is of a
    /// failure or that its sender solicited.
    pub(super) fn request_notification(&self, only_solicited: bool) -> Result<(), Errno> {
        let request = self.ops().req_notify_cq.ok_or(libc::ENOSYS)?;
        // SAFETY: live.
        check(unsafe { request(self.queue.as_ptr(), only_solicited.into()) })
    }

    fn ops(&self) -> &ffi::ContextOps {
        // SAFETY: live, as the channel holds the context. Drivers fill the table when the device
        // is opened.
        unsafe { &(*self.channel.context.context.as_ptr()).ops }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: live, and nothing uses it any more: queue pairs hold it, and announcements were
        // acknowledged when they were taken.
        destroyed("ibv_destroy_cq", unsafe {
            (self.channel.context.library.ibv_destroy_cq)(self.queue.as_ptr())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_a_device_may_still_write_to_is_not_given_back() {
        assert_eq!(after_refusal(libc::EIO, 1), AfterRefusal::Gone);
        assert_eq!(after_refusal(libc::EBUSY, 999), AfterRefusal::Again);
        assert_eq!(after_refusal(libc::EBUSY, 1000), AfterRefusal::Abort);
        assert_eq!(after_refusal(libc::EINVAL, 1), AfterRefusal::Abort);
    }

    #[test]
    fn results_of_both_kinds() {
        assert_eq!(check(0), Ok(()));
        assert_eq!(check(libc::EINVAL), Err(libc::EINVAL));
        assert_eq!(check(-libc::EINVAL), Err(libc::EINVAL));
    }
}
