//! A library in place of libibverbs, for what no device does on demand: to fail in the middle of a
//! call, to lose completions, to report events at the worst moment.
//!
//! Its objects start with the library's structures, as those of drivers do. It completes only what
//! a test tells it to complete.

mod memory;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex};

use super::device::{Device, IbverbsConfig};
use super::error::IbverbsError;
use super::ffi::{self, Library};
use super::gid::{Entry, Kind};
use super::lock;
use super::objects;

const RESET: i32 = 0;
const ERROR: i32 = 6;
pub(super) const FLUSHED: u32 = 5;

/// How a device takes what is posted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer {
    All,
    /// So many, and names the next.
    Refuse(usize, c_int),
    /// All of them are in its queue, and yet it fails and names none.
    Doorbell(c_int),
}

/// By which call memory was registered, and with which access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Registered {
    /// `ibv_reg_mr`, which knows no optional access.
    Plain(c_uint),
    /// `ibv_reg_mr_iova2`.
    WithOptional(c_uint),
}

/// What runs in the middle of the next call.
type Hook = Mutex<Option<Box<dyn FnOnce() + Send>>>;

/// What a test says to the device, and sees of it.
pub(super) struct Script {
    pub(super) answer: Mutex<Answer>,
    /// Before a post returns, when the requests are in the device's queue.
    pub(super) in_post: Hook,
    /// Before each reset of a queue pair.
    pub(super) before_reset: Mutex<Option<Box<dyn FnMut() + Send>>>,
    /// After an event was acknowledged, before that call returns.
    pub(super) after_acknowledgement: Hook,
    /// Nothing works any more.
    pub(super) dead: AtomicBool,
    /// The address vectors that queue pairs were given.
    pub(super) ways: Mutex<Vec<ffi::AhAttr>>,
    /// How memory was registered.
    pub(super) registered: Mutex<Vec<Registered>>,
    /// What is told of its one port.
    pub(super) port: Mutex<ffi::PortAttr>,
    /// The port's GIDs, by index.
    gids: Vec<[u8; 16]>,
    /// Queue pairs by number.
    pairs: Mutex<HashMap<u32, usize>>,
    events: Mutex<PipeWriter>,
}

#[repr(C)]
struct Context {
    base: ffi::Context,
    script: Arc<Script>,
    events: PipeReader,
}

#[repr(C)]
struct Channel {
    base: ffi::CompChannel,
    reader: PipeReader,
    writer: PipeWriter,
}

#[repr(C)]
struct Queue {
    base: ffi::Cq,
    entries: Mutex<VecDeque<ffi::Wc>>,
    armed: AtomicBool,
    unacknowledged: AtomicI32,
}

#[repr(C)]
struct Pair {
    base: ffi::Qp,
    state: AtomicI32,
    /// Numbers of sends and of receives.
    work: [Mutex<VecDeque<u64>>; 2],
    unacknowledged: AtomicI32,
}

/// A device of the fake library, and what a test does to it.
pub(super) struct Fake {
    pub(super) script: Arc<Script>,
    pub(super) device: Arc<Device>,
}

impl Fake {
    pub(super) fn open() -> Self {
        Self::open_with(&IbverbsConfig::default())
    }

    pub(super) fn open_with(config: &IbverbsConfig) -> Self {
        let (script, context) = context(ethernet(), Vec::new());
        let gid = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let gid = Entry { index: 0, gid, kind: Kind::RoceV2 };
        let limits = context.attributes().unwrap();
        let state = context.port(1).unwrap();
        let device = Device::start(context, "fake", gid, config, &limits, &state).unwrap();
        Self { script, device: Arc::new(device) }
    }

    /// A device that is opened as those of the system are, with this port and these GIDs, as long as that needs no files.
    pub(super) fn open_port(
        config: &IbverbsConfig,
        port: ffi::PortAttr,
        gids: &[&str],
    ) -> Result<Self, IbverbsError> {
        let gids = gids.iter().map(|gid| gid.parse::<std::net::Ipv6Addr>().unwrap().octets());
        let (script, context) = context(port, gids.collect());
        let device = Device::use_port(context, "fake", config)?;
        Ok(Self { script, device: Arc::new(device) })
    }

    /// Reports an event of the device, or of the queue pair with this number.
    pub(super) fn event(&self, event_type: u32, pair: Option<u32>) {
        let element = pair.map_or(0, |number| self.address_of(number));
        if element != 0 {
            // SAFETY: the pair exists, as the test holds it.
            unsafe { &(*(element as *const Pair)).unacknowledged }.fetch_add(1, Ordering::SeqCst);
        }
        self.send_event(element, event_type);
    }

    /// Reports something of the port with this number.
    pub(super) fn port_event(&self, event_type: u32, port: c_int) {
        let mut element = [0; size_of::<usize>()];
        element[..size_of::<c_int>()].copy_from_slice(&port.to_ne_bytes());
        self.send_event(usize::from_ne_bytes(element), event_type);
    }

    /// Reports that the completion queue into which this queue pair's sends complete is broken.
    pub(super) fn queue_error(&self, pair: u32) {
        // SAFETY: both exist, as the test holds them.
        let queue = unsafe { (*(self.address_of(pair) as *const Pair)).base.send_cq };
        // SAFETY: as above.
        unsafe { &(*queue.cast::<Queue>()).unacknowledged }.fetch_add(1, Ordering::SeqCst);
        self.send_event(queue as usize, ffi::EVENT_CQ_ERR);
    }

    fn send_event(&self, element: usize, event_type: u32) {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&element.to_ne_bytes());
        bytes[8..].copy_from_slice(&event_type.to_ne_bytes());
        lock(&self.script.events).write_all(&bytes).unwrap();
    }

    /// Completes the oldest `count` sends of a queue pair.
    pub(super) fn complete_sends(&self, pair: u32, count: usize) {
        // SAFETY: the pair exists, as the test holds it.
        let pair = unsafe { &*(self.address_of(pair) as *const Pair) };
        let done: Vec<u64> = lock(&pair.work[0]).drain(..count).collect();
        done.into_iter().for_each(|number| complete(pair.base.send_cq, number, 0));
    }

    /// The state of a queue pair, by the numbers of `ibv_qp_state`.
    pub(super) fn state(&self, pair: u32) -> i32 {
        // SAFETY: the pair exists, as the test holds it.
        unsafe { &*(self.address_of(pair) as *const Pair) }.state.load(Ordering::SeqCst)
    }

    fn address_of(&self, pair: u32) -> usize {
        lock(&self.script.pairs)[&pair]
    }
}

/// An active port of Ethernet.
pub(super) fn ethernet() -> ffi::PortAttr {
    // SAFETY: integers only.
    let zero: ffi::PortAttr = unsafe { std::mem::zeroed() };
    ffi::PortAttr {
        state: ffi::PORT_ACTIVE,
        active_mtu: 3,
        max_msg_sz: 1 << 30,
        link_layer: ffi::LINK_LAYER_ETHERNET,
        ..zero
    }
}

/// An open device.
fn context(port: ffi::PortAttr, gids: Vec<[u8; 16]>) -> (Arc<Script>, Arc<objects::Context>) {
    let (events, writer) = io::pipe().unwrap();
    let script = Arc::new(Script {
        answer: Mutex::new(Answer::All),
        in_post: Hook::default(),
        before_reset: Mutex::default(),
        after_acknowledgement: Hook::default(),
        dead: AtomicBool::new(false),
        ways: Mutex::default(),
        registered: Mutex::default(),
        port: Mutex::new(port),
        gids,
        pairs: Mutex::default(),
        events: Mutex::new(writer),
    });
    let mut ops = ffi::ContextOps::EMPTY;
    ops.poll_cq = Some(poll_cq);
    ops.req_notify_cq = Some(req_notify_cq);
    ops.post_send = Some(post_send);
    ops.post_recv = Some(post_recv);
    let context = Box::new(Context {
        base: ffi::Context {
            device: ptr::null_mut(),
            ops,
            cmd_fd: -1,
            async_fd: events.as_raw_fd(),
            num_comp_vectors: 1,
        },
        script: Arc::clone(&script),
        events,
    });
    let context = NonNull::from(Box::leak(context)).cast();
    // SAFETY: it was made for this library just now. `close_device` frees it.
    (script, Arc::new(unsafe { objects::Context::of(library(), context) }))
}

fn run(hook: &Hook) {
    let hook = lock(hook).take();
    if let Some(hook) = hook {
        hook();
    }
}

/// # Safety
/// The queue is live.
unsafe fn script_of<'a>(context: *mut ffi::Context) -> &'a Script {
    // SAFETY: all contexts are of this kind.
    unsafe { &(*context.cast::<Context>()).script }
}

fn complete(queue: *mut ffi::Cq, wr_id: u64, status: u32) {
    // SAFETY: a queue pair holds its queues.
    let queue = unsafe { &*queue.cast::<Queue>() };
    // SAFETY: integers only.
    let entry = ffi::Wc { wr_id, status, ..unsafe { std::mem::zeroed() } };
    lock(&queue.entries).push_back(entry);
    if queue.armed.swap(false, Ordering::SeqCst) {
        queue.unacknowledged.fetch_add(1, Ordering::SeqCst);
        let address = (&raw const *queue).addr().to_ne_bytes();
        // SAFETY: a queue's channel outlives it.
        let channel = unsafe { &*queue.base.channel.cast::<Channel>() };
        (&channel.writer).write_all(&address).unwrap();
    }
}

fn library() -> &'static Library {
    static LIBRARY: Library = Library {
        ibv_get_device_list: unused::get_device_list,
        ibv_free_device_list: unused::free_device_list,
        ibv_get_device_name: unused::get_device_name,
        ibv_open_device: unused::open_device,
        ibv_close_device: close_device,
        ibv_query_device: query_device,
        ibv_query_port: query_port,
        ibv_query_gid: query_gid,
        ibv_get_async_event: get_async_event,
        ibv_ack_async_event: ack_async_event,
        ibv_alloc_pd: memory::allocate_domain,
        ibv_dealloc_pd: memory::deallocate_domain,
        ibv_reg_mr: memory::register,
        ibv_dereg_mr: memory::deregister,
        ibv_create_comp_channel: create_comp_channel,
        ibv_destroy_comp_channel: destroy_comp_channel,
        ibv_get_cq_event: get_cq_event,
        ibv_ack_cq_events: ack_cq_events,
        ibv_create_cq: create_cq,
        ibv_destroy_cq: destroy_cq,
        ibv_create_ah: unused::create_ah,
        ibv_destroy_ah: unused::destroy_ah,
        ibv_create_srq: unused::create_srq,
        ibv_modify_srq: unused::modify_srq,
        ibv_destroy_srq: unused::destroy_srq,
        ibv_create_qp: create_qp,
        ibv_modify_qp: modify_qp,
        ibv_query_qp: query_qp,
        ibv_destroy_qp: destroy_qp,
        ibv_reg_mr_iova2: Some(memory::register_with_optional),
        ibv_fork_init: None,
        _library: None,
    };
    &LIBRARY
}

/// What a device that is open already does not need.
mod unused {
    use super::*;

    pub(super) unsafe extern "C" fn get_device_list(_: *mut c_int) -> *mut *mut ffi::Device {
        unreachable!()
    }
    pub(super) unsafe extern "C" fn free_device_list(_: *mut *mut ffi::Device) {
        unreachable!()
    }
    pub(super) unsafe extern "C" fn get_device_name(_: *mut ffi::Device) -> *const c_char {
        unreachable!()
    }
    pub(super) unsafe extern "C" fn open_device(_: *mut ffi::Device) -> *mut ffi::Context {
        unreachable!()
    }
    pub(super) unsafe extern "C" fn create_ah(
        _: *mut ffi::Pd,
        _: *mut ffi::AhAttr,
    ) -> *mut ffi::Ah {
        unreachable!()
    }
    pub(super) unsafe extern "C" fn destroy_ah(_: *mut ffi::Ah) -> c_int {
        unreachable!()
    }
    pub(super) unsafe extern "C" fn create_srq(
        _: *mut ffi::Pd,
        _: *mut ffi::SrqInitAttr,
    ) -> *mut ffi::Srq {
        unreachable!()
    }
    pub(super) unsafe extern "C" fn modify_srq(
        _: *mut ffi::Srq,
        _: *mut ffi::SrqAttr,
        _: c_int,
    ) -> c_int {
        unreachable!()
    }
    pub(super) unsafe extern "C" fn destroy_srq(_: *mut ffi::Srq) -> c_int {
        unreachable!()
    }
}

unsafe extern "C" fn close_device(context: *mut ffi::Context) -> c_int {
    // SAFETY: made by `Fake::open`, and the last use.
    drop(unsafe { Box::from_raw(context.cast::<Context>()) });
    0
}

unsafe extern "C" fn query_device(_: *mut ffi::Context, out: *mut ffi::DeviceAttr) -> c_int {
    // SAFETY: `out` is a zeroed place for them.
    let limits = unsafe { &mut *out };
    (limits.max_qp, limits.max_qp_wr, limits.max_sge) = (100, 1024, 4);
    (limits.max_cq, limits.max_cqe, limits.phys_port_cnt) = (100, 1024, 1);
    (limits.max_qp_rd_atom, limits.max_qp_init_rd_atom) = (16, 16);
    0
}

unsafe extern "C" fn query_port(
    context: *mut ffi::Context,
    _: u8,
    out: *mut ffi::PortAttr,
) -> c_int {
    // SAFETY: live; `out` is a place for them.
    unsafe { *out = *lock(&script_of(context).port) };
    0
}

unsafe extern "C" fn query_gid(
    context: *mut ffi::Context,
    _: u8,
    index: c_int,
    out: *mut ffi::Gid,
) -> c_int {
    // SAFETY: live.
    let gids = unsafe { &script_of(context).gids };
    let Some(gid) = gids.get(index as usize) else { return fail(libc::EINVAL) };
    // SAFETY: a place for it.
    unsafe { *out = ffi::Gid(*gid) };
    0
}

/// Reads one entry of a pipe, which does not block, as the library's descriptors.
fn read_entry<const N: usize>(mut pipe: &PipeReader) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    pipe.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

/// Leaves an error number where the library does.
fn fail(code: c_int) -> c_int {
    // SAFETY: the place is the thread's own.
    unsafe { *libc::__errno_location() = code };
    -1
}

unsafe extern "C" fn get_async_event(
    context: *mut ffi::Context,
    event: *mut ffi::AsyncEvent,
) -> c_int {
    // SAFETY: live.
    let Some(bytes) = read_entry::<12>(unsafe { &(*context.cast::<Context>()).events }) else {
        return fail(libc::EAGAIN);
    };
    let (element, event_type) = bytes.split_at(8);
    let element = usize::from_ne_bytes(element.try_into().unwrap());
    let event_type = u32::from_ne_bytes(event_type.try_into().unwrap());
    // SAFETY: `event` is a place for it.
    unsafe { *event = ffi::AsyncEvent { element: element as *mut c_void, event_type } };
    0
}

unsafe extern "C" fn ack_async_event(event: *mut ffi::AsyncEvent) {
    // SAFETY: `event` was given out above.
    let ffi::AsyncEvent { element, event_type } = unsafe { &*event };
    // SAFETY: what an event is of lives until it is acknowledged.
    unsafe {
        match *event_type {
            ffi::EVENT_CQ_ERR => {
                (*element.cast::<Queue>()).unacknowledged.fetch_sub(1, Ordering::SeqCst);
            }
            ffi::EVENT_QP_FATAL => {
                let pair = element.cast::<Pair>();
                let context = (*pair).base.context;
                (*pair).unacknowledged.fetch_sub(1, Ordering::SeqCst);
                run(&script_of(context).after_acknowledgement);
            }
            _ => {}
        }
    }
}

unsafe extern "C" fn create_comp_channel(context: *mut ffi::Context) -> *mut ffi::CompChannel {
    let (reader, writer) = io::pipe().unwrap();
    let base = ffi::CompChannel { context, fd: reader.as_raw_fd(), refcnt: 0 };
    Box::into_raw(Box::new(Channel { base, reader, writer })).cast()
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ffi::CompChannel) -> c_int {
    // SAFETY: made above, and the last use.
    drop(unsafe { Box::from_raw(channel.cast::<Channel>()) });
    0
}

unsafe extern "C" fn get_cq_event(
    channel: *mut ffi::CompChannel,
    queue: *mut *mut ffi::Cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: live.
    let Some(address) = read_entry::<8>(unsafe { &(*channel.cast::<Channel>()).reader }) else {
        return fail(libc::EAGAIN);
    };
    let found = usize::from_ne_bytes(address) as *mut ffi::Cq;
    // SAFETY: the others are places for the results; the queue lives until this is acknowledged.
    unsafe { (*queue, *cq_context) = (found, (*found).cq_context) };
    0
}

unsafe extern "C" fn ack_cq_events(queue: *mut ffi::Cq, count: c_uint) {
    // SAFETY: live.
    let queue = unsafe { &*queue.cast::<Queue>() };
    queue.unacknowledged.fetch_sub(count as i32, Ordering::SeqCst);
}

unsafe extern "C" fn create_cq(
    context: *mut ffi::Context,
    capacity: c_int,
    cq_context: *mut c_void,
    channel: *mut ffi::CompChannel,
    _: c_int,
) -> *mut ffi::Cq {
    let base = ffi::Cq { context, channel, cq_context, handle: 0, cqe: capacity };
    let (armed, unacknowledged) = (AtomicBool::new(false), AtomicI32::new(0));
    let queue = Queue { base, entries: Mutex::default(), armed, unacknowledged };
    Box::into_raw(Box::new(queue)).cast()
}

/// Waits as the library does, which is for ever when nobody acknowledges.
fn await_acknowledgements(count: &AtomicI32) {
    while count.load(Ordering::SeqCst) > 0 {
        std::thread::yield_now();
    }
}

unsafe extern "C" fn destroy_cq(queue: *mut ffi::Cq) -> c_int {
    // SAFETY: made above, and the last use.
    unsafe {
        await_acknowledgements(&(*queue.cast::<Queue>()).unacknowledged);
        drop(Box::from_raw(queue.cast::<Queue>()));
    }
    0
}

unsafe extern "C" fn poll_cq(queue: *mut ffi::Cq, limit: c_int, out: *mut ffi::Wc) -> c_int {
    // SAFETY: live.
    let queue = unsafe { &*queue.cast::<Queue>() };
    let mut entries = lock(&queue.entries);
    let count = entries.len().min(limit as usize);
    for (index, entry) in entries.drain(..count).enumerate() {
        // SAFETY: `out` has room for `limit`.
        unsafe { out.add(index).write(entry) };
    }
    count as c_int
}

unsafe extern "C" fn req_notify_cq(queue: *mut ffi::Cq, _: c_int) -> c_int {
    // SAFETY: live.
    unsafe { &*queue.cast::<Queue>() }.armed.store(true, Ordering::SeqCst);
    0
}

unsafe extern "C" fn create_qp(_: *mut ffi::Pd, attributes: *mut ffi::QpInitAttr) -> *mut ffi::Qp {
    // SAFETY: a structure that is filled in, whose queues are live.
    let (attributes, context) = unsafe { (&*attributes, (*(*attributes).send_cq).context) };
    // SAFETY: live.
    let script = unsafe { script_of(context) };
    let mut pairs = lock(&script.pairs);
    // The smallest that is free, as if numbers were scarce.
    let qp_num = (1..).find(|number| !pairs.contains_key(number)).unwrap();
    let base = ffi::Qp {
        context,
        qp_context: ptr::null_mut(),
        pd: ptr::null_mut(),
        send_cq: attributes.send_cq,
        recv_cq: attributes.recv_cq,
        srq: ptr::null_mut(),
        handle: 0,
        qp_num,
    };
    let (state, unacknowledged) = (AtomicI32::new(RESET), AtomicI32::new(0));
    let pair = Pair { base, state, work: Default::default(), unacknowledged };
    let pair = Box::into_raw(Box::new(pair));
    pairs.insert(qp_num, pair.addr());
    pair.cast()
}

unsafe extern "C" fn modify_qp(pair: *mut ffi::Qp, attr: *mut ffi::QpAttr, mask: c_int) -> c_int {
    // SAFETY: live.
    let (script, pair, attributes) =
        unsafe { (script_of((*pair).context), &*pair.cast::<Pair>(), *attr) };
    let to = attributes.qp_state;
    if script.dead.load(Ordering::SeqCst) {
        return libc::EIO;
    }
    if mask & ffi::qp_mask::AV != 0 {
        lock(&script.ways).push(attributes.ah_attr);
    }
    if to == RESET
        && let Some(hook) = &mut *lock(&script.before_reset)
    {
        hook();
    }
    pair.state.store(to, Ordering::SeqCst);
    for (work, queue) in pair.work.iter().zip([pair.base.send_cq, pair.base.recv_cq]) {
        let work = std::mem::take(&mut *lock(work));
        match to {
            // Nothing of it is heard of again.
            RESET => {
                // SAFETY: a queue pair holds its queues.
                lock(&unsafe { &*queue.cast::<Queue>() }.entries).clear();
            }
            ERROR => work.into_iter().for_each(|number| complete(queue, number, FLUSHED)),
            _ => {}
        }
    }
    0
}

unsafe extern "C" fn query_qp(
    pair: *mut ffi::Qp,
    attributes: *mut ffi::QpAttr,
    _: c_int,
    _: *mut ffi::QpInitAttr,
) -> c_int {
    // SAFETY: live; `attributes` is a place for the result.
    unsafe {
        (*attributes).qp_state = (*pair.cast::<Pair>()).state.load(Ordering::SeqCst);
    }
    0
}

unsafe extern "C" fn destroy_qp(pair: *mut ffi::Qp) -> c_int {
    // SAFETY: made above, and the last use.
    unsafe {
        await_acknowledgements(&(*pair.cast::<Pair>()).unacknowledged);
        lock(&script_of((*pair).context).pairs).remove(&(*pair).qp_num);
        drop(Box::from_raw(pair.cast::<Pair>()));
    }
    0
}

/// Takes what the script says, and returns the index of the one to name, if one is, and the code.
fn take(pair: &Pair, receives: bool, numbers: &[u64]) -> (Option<usize>, c_int) {
    // SAFETY: live.
    let script = unsafe { script_of(pair.base.context) };
    let answer = *lock(&script.answer);
    let (count, named, code) = match answer {
        Answer::All => (numbers.len(), None, 0),
        Answer::Refuse(count, code) => (count, Some(count), code),
        Answer::Doorbell(code) => (numbers.len(), None, code),
    };
    lock(&pair.work[usize::from(receives)]).extend(&numbers[..count]);
    run(&script.in_post);
    (named, code)
}

unsafe extern "C" fn post_send(
    pair: *mut ffi::Qp,
    first: *mut ffi::SendWr,
    bad: *mut *mut ffi::SendWr,
) -> c_int {
    // SAFETY: a live pair, a list that ends with null, a place for one of it.
    unsafe { post(pair, false, first, bad, |request| (request.wr_id, request.next)) }
}

unsafe extern "C" fn post_recv(
    pair: *mut ffi::Qp,
    first: *mut ffi::RecvWr,
    bad: *mut *mut ffi::RecvWr,
) -> c_int {
    // SAFETY: as above.
    unsafe { post(pair, true, first, bad, |request| (request.wr_id, request.next)) }
}

/// Posts a list of requests, each of which has a number and a next one.
///
/// # Safety
/// The queue pair is live, the list ends with null, and there is a place for the one that was bad.
unsafe fn post<R>(
    pair: *mut ffi::Qp,
    receives: bool,
    first: *mut R,
    bad: *mut *mut R,
    read: impl Fn(&R) -> (u64, *mut R),
) -> c_int {
    let (mut places, mut numbers) = (Vec::new(), Vec::new());
    let mut next = first;
    // SAFETY: the list ends with null.
    while let Some(request) = unsafe { next.as_ref() } {
        places.push(next);
        let (number, after) = read(request);
        numbers.push(number);
        next = after;
    }
    // SAFETY: live.
    let (named, code) = take(unsafe { &*pair.cast::<Pair>() }, receives, &numbers);
    if let Some(index) = named {
        // SAFETY: a place for it.
        unsafe { *bad = places[index] };
    }
    code
}
