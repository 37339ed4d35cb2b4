//! The system's RDMA devices.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use millstream_net::DriverCounters;
use millstream_roce::{AsyncEvent, Counters, PortAddress};
use millstream_wire::Mtu;

use super::error::IbverbsError;
use super::events::{Events, Registry};
use super::gid::{self, Entry, Kind, Refusal};
use super::objects::{self, Channel, Context, DeviceList, Errno};
use super::{ffi, sysfs};
use crate::device::PortHandler;
use crate::{Atomicity, DeviceAttributes};

/// What a device of the system is opened with.
#[derive(Clone, Debug)]
pub struct IbverbsConfig {
    /// The system's name for it, such as `mlx5_0`. Without one, the first device that works.
    pub name: Option<String>,
    /// Its port, from 1.
    pub port: u8,
    /// The entry of the port's GID table that names the device (`MC_GID_INDEX`). Without one, the
    /// best of RoCEv2: an IPv4 address before an IPv6 address before a link-local one. Of a port of InfiniBand
    /// it is the first, which is made of the subnet's prefix and the port's GUID (IBTA 4.1.1).
    pub gid_index: Option<u8>,
    /// The address that the entry must be of; of a port of InfiniBand, the GID.
    pub address: Option<IpAddr>,
    /// Let writes to memory overtake each other on their way through PCI Express, where the device
    /// can. Completions are never overtaken, so only who looks at the bytes before a completion
    /// announces them can tell.
    pub relaxed_ordering: bool,
    /// The traffic class in the global route header of what its queue pairs send (`MC_IB_TC`).
    pub traffic_class: u8,
    /// The service level of its queue pairs, 0 to 15 (`MC_IB_SL`). Over Ethernet, devices make of it the priority
    /// in a VLAN tag.
    pub service_level: u8,
}

impl Default for IbverbsConfig {
    fn default() -> Self {
        Self {
            name: None,
            port: 1,
            gid_index: None,
            address: None,
            relaxed_ordering: true,
            traffic_class: 0,
            service_level: 0,
        }
    }
}

impl IbverbsConfig {
    /// The defaults, with what the environment says: `MC_GID_INDEX`, 0 to 255, or -1 for the best.
    pub fn from_environment() -> Result<Self, IbverbsError> {
        let value = std::env::var_os(GID_INDEX);
        let gid_index =
            gid_index(value.as_deref().map(|value| value.to_string_lossy()).as_deref())?;
        Ok(Self { gid_index, ..Self::default() })
    }
}

const GID_INDEX: &str = "MC_GID_INDEX";

/// What a value of [`GID_INDEX`] means.
fn gid_index(value: Option<&str>) -> Result<Option<u8>, IbverbsError> {
    match value {
        None | Some("-1") => Ok(None),
        Some(value) => value.parse().map(Some).map_err(|_| IbverbsError::Environment {
            variable: GID_INDEX,
            value: value.to_owned(),
            range: "0 to 255, or -1 for the best of RoCE v2",
        }),
    }
}

/// The names of the system's devices.
pub(crate) fn list() -> Result<Vec<String>, IbverbsError> {
    match DeviceList::get() {
        Ok(list) => Ok(list.names()),
        Err(IbverbsError::NoDevice) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// An open device.
pub(crate) struct Device {
    name: String,
    port: u8,
    gid: Entry,
    /// Its LID when it was opened; 0 unless its port is of InfiniBand.
    lid: u16,
    relaxed_ordering: bool,
    traffic_class: u8,
    service_level: u8,
    attributes: DeviceAttributes,
    max_shared_receives: usize,
    registry: Arc<Registry>,
    /// Ends its thread, which uses the two below.
    _events: Events,
    channel: Arc<Channel>,
    context: Arc<Context>,
}

impl Device {
    /// Opens a device.
    pub(crate) fn open(config: &IbverbsConfig) -> Result<Self, IbverbsError> {
        let list = DeviceList::get()?;
        let names = list.names();
        let Some(name) = &config.name else {
            // The first that works, or else why none does.
            let mut errors = Vec::new();
            for (index, name) in names.iter().enumerate() {
                match Self::open_one(&list, index, name, config) {
                    Ok(device) => return Ok(device),
                    Err(error) => errors.push(error),
                }
            }
            return Err(match config.address {
                Some(address) if !errors.is_empty() => {
                    let reasons = errors.iter().map(ToString::to_string).collect();
                    IbverbsError::UnknownAddress { address, reasons }
                }
                _ => errors.into_iter().next().unwrap_or(IbverbsError::NoDevice),
            });
        };
        match names.iter().position(|other| other == name) {
            Some(index) => Self::open_one(&list, index, name, config),
            None if names.is_empty() => Err(IbverbsError::NoDevice),
            None => Err(IbverbsError::UnknownDevice { name: name.clone(), available: names }),
        }
    }

    fn open_one(
        list: &DeviceList,
        index: usize,
        name: &str,
        config: &IbverbsConfig,
    ) -> Result<Self, IbverbsError> {
        let context = list.open(index).map_err(failed(name, "ibv_open_device"))?;
        Self::use_port(Arc::new(context), name, config)
    }

    /// Starts to use an open device, if its port works.
    pub(super) fn use_port(
        context: Arc<Context>,
        name: &str,
        config: &IbverbsConfig,
    ) -> Result<Self, IbverbsError> {
        let limits = context.attributes().map_err(failed(name, "ibv_query_device"))?;
        let (device, port, ports) = (name.to_owned(), config.port, limits.phys_port_cnt);
        if port == 0 || port > ports {
            return Err(IbverbsError::NoSuchPort { device, port, ports });
        }
        let state = context.port(port).map_err(failed(name, "ibv_query_port"))?;
        let (link_layer, infiniband) = (state.link_layer, is_infiniband(&state));
        if !infiniband && link_layer != ffi::LINK_LAYER_ETHERNET {
            return Err(IbverbsError::OtherLinkLayer { device, port, link_layer });
        }
        if state.state != ffi::PORT_ACTIVE {
            let state = match state.state {
                1 => "down",
                2 => "initializing",
                3 => "armed",
                _ => "not active",
            };
            if infiniband {
                return Err(IbverbsError::NoSubnet { device, port, found: format!("is {state}") });
            }
            return Err(IbverbsError::PortDown { device, port, state });
        }
        let gid = choose_gid(&context, name, &state, config)?;
        let place = PortAddress { ip: gid.address(), lid: state.lid };
        if infiniband && !(place.is_infiniband() && place.has_unicast_lid()) {
            let found = format!("has the LID {:#06x} and the GID {}", place.lid, place.ip);
            return Err(IbverbsError::NoSubnet { device, port, found });
        }

        Self::start(context, name, gid, config, &limits, &state)
    }

    /// Starts to use an open device whose port works.
    pub(super) fn start(
        context: Arc<Context>,
        name: &str,
        gid: Entry,
        config: &IbverbsConfig,
        limits: &ffi::DeviceAttr,
        state: &ffi::PortAttr,
    ) -> Result<Self, IbverbsError> {
        let channel = Channel::create(&context).map_err(failed(name, "ibv_create_comp_channel"))?;
        for descriptor in [channel.descriptor(), context.event_descriptor()] {
            objects::set_nonblocking(descriptor).map_err(failed(name, "fcntl"))?;
        }
        let channel = Arc::new(channel);
        let thread_name = format!("ibverbs-{name}");
        let (events, registry) =
            Events::start(thread_name, Arc::clone(&context), Arc::clone(&channel)).map_err(
                |source| IbverbsError::System {
                    device: name.to_owned(),
                    call: "the start of its thread",
                    source,
                },
            )?;
        Ok(Self {
            name: name.to_owned(),
            port: config.port,
            gid,
            lid: if is_infiniband(state) { state.lid } else { 0 },
            relaxed_ordering: config.relaxed_ordering,
            traffic_class: config.traffic_class,
            service_level: config.service_level,
            attributes: attributes(limits, state),
            max_shared_receives: if limits.max_srq > 0 { count(limits.max_srq_wr) } else { 0 },
            registry,
            _events: events,
            channel,
            context,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.gid.address()
    }

    /// A subnet manager may give it another one.
    pub(crate) fn lid(&self) -> u16 {
        let now = || self.context.port(self.port).ok().map(|state| state.lid);
        match self.lid {
            0 => 0,
            before => now().filter(|&lid| lid != 0).unwrap_or(before),
        }
    }

    pub(super) fn is_infiniband(&self) -> bool {
        self.lid != 0
    }

    pub(super) fn port_address(&self) -> PortAddress {
        PortAddress { ip: self.address(), lid: self.lid }
    }

    pub(crate) fn attributes(&self) -> DeviceAttributes {
        self.attributes
    }

    /// Devices know one path MTU for all peers: the port's.
    pub(crate) fn path_mtu(&self, _peer: IpAddr) -> io::Result<Mtu> {
        let state = self.context.port(self.port).map_err(io::Error::from_raw_os_error)?;
        mtu(state.active_mtu).ok_or_else(|| {
            let text = format!("{} reports the path MTU {}", self.name, state.active_mtu);
            io::Error::new(io::ErrorKind::InvalidData, text)
        })
    }

    pub(crate) fn counters(&self) -> Counters {
        sysfs::Port::new(&self.name, self.port).counters()
    }

    pub(crate) fn driver_counters(&self) -> DriverCounters {
        DriverCounters::default()
    }

    pub(crate) fn poll_event(&self) -> Option<AsyncEvent> {
        self.registry.poll_event()
    }

    pub(crate) fn wait_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        self.registry.wait_event(timeout)
    }

    pub(crate) fn watch_port(&self, handler: PortHandler) {
        self.registry.watch_port(self.port, handler);
    }

    pub(crate) fn port_works(&self) -> bool {
        self.context.port(self.port).is_ok_and(|port| port.state == ffi::PORT_ACTIVE)
    }

    pub(crate) fn failure(&self) -> Option<String> {
        self.registry.failure().map(str::to_owned)
    }

    pub(super) fn failed(&self) -> bool {
        self.registry.failure().is_some()
    }

    pub(super) fn port(&self) -> u8 {
        self.port
    }

    pub(super) fn gid_index(&self) -> u8 {
        self.gid.index
    }

    pub(super) fn relaxed_ordering(&self) -> bool {
        self.relaxed_ordering
    }

    /// Of all that its queue pairs send.
    pub(super) fn traffic_class(&self) -> u8 {
        self.traffic_class
    }

    /// Of all its queue pairs.
    pub(super) fn service_level(&self) -> u8 {
        self.service_level
    }

    /// Requests in a shared receive queue; 0 when there are none of these.
    pub(super) fn max_shared_receives(&self) -> usize {
        self.max_shared_receives
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(super) fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name).finish()
    }
}

/// Makes the error of a call that failed.
fn failed(device: &str, call: &'static str) -> impl FnOnce(Errno) -> IbverbsError {
    move |code| IbverbsError::System {
        device: device.to_owned(),
        call,
        source: io::Error::from_raw_os_error(code),
    }
}

const fn is_infiniband(port: &ffi::PortAttr) -> bool {
    port.link_layer == ffi::LINK_LAYER_INFINIBAND
}

/// By the numbers of `ibv_mtu`.
fn mtu(number: i32) -> Option<Mtu> {
    let index = usize::try_from(number).ok()?.checked_sub(1)?;
    Mtu::ALL.get(index).copied()
}

/// The library's numbers are signed, and some drivers say -1 where they know none.
fn count(number: i32) -> usize {
    usize::try_from(number).unwrap_or(0)
}

fn attributes(limits: &ffi::DeviceAttr, port: &ffi::PortAttr) -> DeviceAttributes {
    let reads = count(limits.max_qp_rd_atom.min(limits.max_qp_init_rd_atom));
    DeviceAttributes {
        max_queue_pairs: count(limits.max_qp),
        max_completion_queues: count(limits.max_cq),
        max_work_requests: count(limits.max_qp_wr),
        max_scatter_gather: count(limits.max_sge).min(crate::MAX_SCATTER_GATHER),
        max_completions: count(limits.max_cqe),
        // Devices tell it only by refusing a queue pair.
        max_inline: millstream_roce::MAX_INLINE,
        max_memory_regions: count(limits.max_mr),
        // A driver that says nothing has no limit.
        max_memory_region_length: match limits.max_mr_size {
            0 => u64::MAX,
            length => length,
        },
        max_message_length: port.max_msg_sz,
        max_datagram_length: mtu(port.active_mtu).map_or(0, |mtu| mtu.bytes() as u32),
        // As many as attributes can ask for.
        max_reads: reads.min(128) as u8,
        // By the numbers of `ibv_atomic_cap`.
        atomicity: match limits.atomic_cap {
            1 => Atomicity::Device,
            2 => Atomicity::Global,
            _ => Atomicity::None,
        },
    }
}

fn choose_gid(
    context: &Context,
    name: &str,
    state: &ffi::PortAttr,
    config: &IbverbsConfig,
) -> Result<Entry, IbverbsError> {
    let port = config.port;
    let files = sysfs::Port::new(name, port);
    let infiniband = is_infiniband(state);
    // A queue pair names an entry by a byte.
    let length = state.gid_tbl_len.clamp(0, 256) as u16;
    let entries: Vec<Entry> = (0..length)
        .filter_map(|index| {
            let index = index as u8;
            // Most are empty, which the library says at less cost than a file that cannot be read.
            let gid = context.gid(port, index).ok().filter(|gid| *gid != [0; 16])?;
            // The kernel calls those of InfiniBand and of RoCEv1 the same, `IB/RoCE v1`.
            let kind = match infiniband {
                true => Kind::InfiniBand,
                false if files.gid_is_version_2(index)? => Kind::RoceV2,
                false => Kind::RoceV1,
            };
            Some(Entry { index, gid, kind })
        })
        .collect();
    let device = name.to_owned();
    gid::choose(&entries, config.gid_index, config.address).map_err(|refusal| match refusal {
        Refusal::None if infiniband => {
            IbverbsError::NoSubnet { device, port, found: "has no GID".to_owned() }
        }
        Refusal::None => IbverbsError::NoGid { device, port },
        Refusal::Index { index, found, usable } => {
            IbverbsError::UnsuitableGid { device, port, index, found, usable }
        }
        Refusal::Address { address, usable } => {
            IbverbsError::OtherAddress { device, port, address, usable }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gid_index_of_the_environment() {
        for (value, expected) in
            [(None, None), (Some("-1"), None), (Some("0"), Some(0)), (Some("255"), Some(255))]
        {
            assert_eq!(gid_index(value).unwrap(), expected);
        }
        for bad in ["", "256", "-2", "three", "1 "] {
            let error = gid_index(Some(bad)).unwrap_err().to_string();
            let start = format!("MC_GID_INDEX={bad}: it is 0 to 255");
            assert!(error.starts_with(&start), "{error}");
        }
    }
}
