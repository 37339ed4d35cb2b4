//! One case's connection: a queue pair, its completions and its memory.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use millstream_verbs::{
    Access, Completion, CompletionQueue, DatagramDestination, Device, Mtu, Piece, ProtectionDomain,
    Psn, Qpn, QueuePair, QueuePairAttributes, QueuePairCapabilities, QueuePairOptions,
    QueuePairState, ReceiveRequest, SendRequest, SharedReceiveQueue, Transport,
};

use super::arena::Arena;
use super::control::Control;
use super::relay::Relay;
use super::{Role, Skip};

/// For completions that must come; the peer may be an emulated machine that is busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// How often a wait looks at whether the peer has given up.
const GLANCE: Duration = Duration::from_millis(100);
/// Requests in each queue.
pub(crate) const DEPTH: usize = 128;

pub(crate) const ALL_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// What a case connects its queue pairs with. Where the two sides differ, it says so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) path_mtu: Mtu,
    /// The first packet sequence number of each direction.
    pub(crate) first_psn: Psn,
    pub(crate) timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    /// What the queue pairs let the peer do.
    pub(crate) pair_access: Access,
    /// What the responder's memory lets the requester do.
    pub(crate) region_access: Access,
    /// READs and atomic operations at a time.
    pub(crate) reads: u8,
    pub(crate) transport: Transport,
    /// Whether receives come from a shared queue.
    pub(crate) shared_receives: bool,
    /// Whether a soft device may send a WRITE as several messages.
    pub(crate) split_writes: bool,
    /// Bytes that a request can bring along.
    pub(crate) inline: usize,
    /// Bytes of each side's source and of its target.
    pub(crate) arena: usize,
}

impl Settings {
    /// 268 ms, seven times: even an emulated machine answers in that time.
    pub(crate) const USUAL: Self = Self {
        path_mtu: Mtu::B1024,
        first_psn: Psn::new(0x12_3456),
        timeout: 16,
        retry_count: 6,
        rnr_retry: 7,
        pair_access: ALL_ACCESS,
        region_access: ALL_ACCESS,
        reads: 16,
        transport: Transport::ReliableConnection,
        shared_receives: false,
        split_writes: false,
        inline: 0,
        arena: 64 << 10,
    };
}

/// Of both sides, for datagrams.
const QUEUE_KEY: u32 = 0x1234_5678;
/// 0.64 ms.
const RNR_TIMER: u8 = 12;
/// The seeds of the letters in the sources of the requester and of the responder.
const SEEDS: [u8; 2] = [1, 2];

/// The peer's side of the connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub(crate) address: IpAddr,
    pub(crate) number: Qpn,
    pub(crate) key: u32,
    /// Of the first byte of its source.
    pub(crate) source: u64,
    /// Of the first byte of its target.
    pub(crate) target: u64,
    /// The longest message that its device sends.
    pub(crate) max_message_length: u64,
}

pub(crate) struct Link<'a> {
    // Dropped from the top: the queue pair before its memory.
    pub(crate) pair: Option<QueuePair>,
    shared_receives: Option<SharedReceiveQueue>,
    completions: CompletionQueue,
    /// Polled, and not asked for yet.
    ready: Vec<Completion>,
    pub(crate) arena: Arena,
    pub(crate) device: &'a Device,
    pub(crate) control: &'a mut Control,
    /// Only one of the two sides has it.
    pub(crate) relay: Option<&'a mut Relay>,
    pub(crate) role: Role,
    pub(crate) remote: Remote,
    pub(crate) settings: Settings,
}

impl<'a> Link<'a> {
    /// Makes a queue pair and connects it with the peer's.
    pub(crate) fn connect(
        device: &'a Device,
        control: &'a mut Control,
        relay: Option<&'a mut Relay>,
        role: Role,
        settings: Settings,
    ) -> Result<Self> {
        let domain = device.allocate_protection_domain();
        let completions = device.create_completion_queue(2 * DEPTH)?;
        let capabilities = QueuePairCapabilities {
            max_inline: settings.inline,
            ..QueuePairCapabilities::new(DEPTH, DEPTH)
        };
        let shared_receives = match settings.shared_receives {
            true => Some(domain.create_shared_receive_queue(DEPTH)?),
            false => None,
        };
        let options = QueuePairOptions {
            transport: settings.transport,
            shared_receives: shared_receives.as_ref(),
            split_writes: settings.split_writes,
            ..QueuePairOptions::new(&completions, capabilities)
        };
        let pair = domain.create_queue_pair_with(&options)?;
        let arena = make_arena(&domain, role, &settings)?;
        let ours = format!(
            "{} {:x} {:x} {:x} {:x} {:x}",
            device.address(),
            pair.number().value(),
            arena.region().remote_key(),
            arena.source(0),
            arena.target(0),
            device.attributes().max_message_length
        );
        let theirs = control.exchange("address", &ours)?;
        let remote = Remote::parse(&theirs).with_context(|| format!("the address {theirs:?}"))?;
        let limit = device.path_mtu(remote.address)?;
        let link = Self {
            pair: Some(pair),
            shared_receives,
            completions,
            ready: Vec::new(),
            arena,
            device,
            control,
            relay,
            role,
            remote,
            settings,
        };
        if settings.path_mtu > limit {
            return Err(Skip(format!("the link's path MTU is {limit}")).into());
        }
        link.bring_up()?;
        link.control.meet("connected")?;
        Ok(link)
    }

    fn bring_up(&self) -> Result<()> {
        let pair = self.pair()?;
        let transitions = match self.settings.transport {
            Transport::ReliableConnection => self.for_connection(),
            Transport::UnreliableDatagram => self.for_datagrams(),
        };
        let states = [
            QueuePairState::Initialized,
            QueuePairState::ReadyToReceive,
            QueuePairState::ReadyToSend,
        ];
        for (state, attributes) in states.into_iter().zip(transitions) {
            pair.modify(&QueuePairAttributes { state: Some(state), ..attributes })?;
        }
        Ok(())
    }

    /// What each of the three transitions needs.
    fn for_connection(&self) -> [QueuePairAttributes; 3] {
        let settings = &self.settings;
        [
            QueuePairAttributes {
                access: Some(settings.pair_access),
                ..QueuePairAttributes::default()
            },
            QueuePairAttributes {
                remote_address: Some(self.remote.address),
                path_mtu: Some(settings.path_mtu),
                destination_qpn: Some(self.remote.number),
                receive_psn: Some(settings.first_psn),
                responder_resources: Some(settings.reads),
                minimum_rnr_timer: Some(RNR_TIMER),
                ..QueuePairAttributes::default()
            },
            QueuePairAttributes {
                send_psn: Some(settings.first_psn),
                timeout: Some(settings.timeout),
                retry_count: Some(settings.retry_count),
                rnr_retry: Some(settings.rnr_retry),
                initiator_depth: Some(settings.reads),
                ..QueuePairAttributes::default()
            },
        ]
    }

    fn for_datagrams(&self) -> [QueuePairAttributes; 3] {
        [
            QueuePairAttributes { queue_key: Some(QUEUE_KEY), ..QueuePairAttributes::default() },
            QueuePairAttributes::default(),
            QueuePairAttributes {
                send_psn: Some(self.settings.first_psn),
                ..QueuePairAttributes::default()
            },
        ]
    }

    pub(crate) fn pair(&self) -> Result<&QueuePair> {
        self.pair.as_ref().context("the queue pair was closed")
    }

    /// The seed of our source, and of the peer's.
    pub(crate) fn seeds(&self) -> (u8, u8) {
        match self.role {
            Role::Requester => (SEEDS[0], SEEDS[1]),
            Role::Responder => (SEEDS[1], SEEDS[0]),
        }
    }

    /// The longest message that the requester's device sends.
    pub(crate) fn max_message_length(&self) -> usize {
        match self.role {
            Role::Requester => self.device.attributes().max_message_length as usize,
            Role::Responder => self.remote.max_message_length as usize,
        }
    }

    pub(crate) fn post_send<P: AsRef<[Piece]>>(&self, request: SendRequest<P>) -> Result<()> {
        let datagram = (self.settings.transport == Transport::UnreliableDatagram).then_some(
            DatagramDestination {
                address: self.remote.address,
                qpn: self.remote.number,
                queue_key: QUEUE_KEY,
            },
        );
        let request = SendRequest { datagram, ..request };
        self.pair()?.post_send(&[request]).map_err(|(_, error)| anyhow!(error).context("post_send"))
    }

    /// Posts a request that brings these bytes along.
    pub(crate) fn post_send_inline<P: AsRef<[Piece]>>(
        &self,
        request: &SendRequest<P>,
        bytes: &[u8],
    ) -> Result<()> {
        self.pair()?.post_send_inline(request, bytes).context("post_send_inline")
    }

    pub(crate) fn post_receive<P: AsRef<[Piece]>>(&self, id: u64, pieces: P) -> Result<()> {
        let request = [ReceiveRequest { id, pieces }];
        let posted = match &self.shared_receives {
            Some(queue) => queue.post_receive(&request),
            None => self.pair()?.post_receive(&request),
        };
        posted.map_err(|(_, error)| anyhow!(error).context("post_receive"))
    }

    /// The next completion. Fails when the peer has given up, or when none comes.
    pub(crate) fn completion(&mut self) -> Result<Completion> {
        let start = Instant::now();
        while self.ready.is_empty() {
            if self.completions.poll(&mut self.ready, DEPTH) > 0 {
                break;
            }
            self.control.check()?;
            if start.elapsed() > PATIENCE {
                bail!("no completion in {PATIENCE:?}: {}", self.situation());
            }
            self.completions.wait(GLANCE);
        }
        Ok(self.ready.remove(0))
    }

    /// Waits until `condition` holds. For what has no event: bytes of memory, counters, states.
    pub(crate) fn await_that(
        &mut self,
        what: &str,
        mut condition: impl FnMut(&Self) -> bool,
    ) -> Result<()> {
        let start = Instant::now();
        while !condition(self) {
            self.control.check()?;
            if start.elapsed() > PATIENCE {
                bail!("{what}: not in {PATIENCE:?}: {}", self.situation());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Fails if there is any completion that nobody asked for.
    pub(crate) fn no_completion(&mut self) -> Result<()> {
        self.completions.poll(&mut self.ready, DEPTH);
        match self.ready.first() {
            Some(completion) => bail!("a completion too many: {completion:?}"),
            None => Ok(()),
        }
    }

    /// For error messages: where the queue pair and the device are.
    fn situation(&self) -> String {
        let state = self.pair.as_ref().map(QueuePair::state);
        format!("{state:?}, {:?}", self.device.counters())
    }
}

impl Remote {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let address = words.next()?.parse().ok()?;
        let mut number = || u64::from_str_radix(words.next()?, 16).ok();
        Some(Self {
            address,
            number: Qpn::new(u32::try_from(number()?).ok()?),
            key: u32::try_from(number()?).ok()?,
            source: number()?,
            target: number()?,
            max_message_length: number()?,
        })
    }
}

fn make_arena(domain: &ProtectionDomain, role: Role, settings: &Settings) -> Result<Arena> {
    let (seed, access) = match role {
        Role::Requester => (SEEDS[0], ALL_ACCESS),
        Role::Responder => (SEEDS[1], settings.region_access),
    };
    Arena::new(domain, settings.arena, seed, access).context("cannot register the memory")
}

/// The list of these pieces. Empty pieces are left out: some devices take 0 for 2^31.
pub(crate) fn list(pieces: &[Piece]) -> Result<Vec<Piece>> {
    Ok(pieces.iter().copied().filter(|piece| piece.length > 0).collect())
}
