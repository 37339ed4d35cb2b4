//! The switch as a daemon: a node that adds, and a controller that says for whom.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use millstream_inc::controllers::{Controllers, Search};
use millstream_inc::protocol::{
    Commanded, FromController, Refusal, SwitchLimits, TermError, ToController, encode, shortened,
};
use millstream_inc::{
    Abort, CommunicatorCounts, CommunicatorSpec, HeldNodes, ParentSpec, SwitchConfig as NodeConfig,
    SwitchEvent, packets_too_long,
};
use millstream_net::tls::CallerTls;
use millstream_net::token::{Initiator, Purpose, Token, TokenError};
use millstream_net::{Driver, Failure, OpenError};
use millstream_wire::Mtu;
use thiserror::Error;
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::data_plane::DataPlane;
use crate::reader::{MessageReader, ReadError};
use crate::switch_pages::{SwitchView, port_counters};
use crate::tls::Called;

/// To the controller.
type Writer = WriteHalf<Called>;

/// The code of [`Abort::Requested`] that hosts get when none of them has come back to a controller that was
/// restarted.
pub const UNCLAIMED: u32 = 1;

/// How long a message may take to leave. A controller that stands still takes some all the same.
const WRITE_TIMEOUT: Duration = Duration::from_secs(4);

/// How long a connection may take, and where there are other controllers to ask.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT_OF_SEVERAL: Duration = Duration::from_secs(1);

/// Where there are others to ask: how long the controller may be silent before it has registered this switch, and
/// after. By then the lease of one that stands still is over.
const SILENCE: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(5)];

/// How long a controller may take to prove that it has the token.
const PROOF_TIMEOUT: Duration = Duration::from_secs(5);

/// Between attempts to reach the controller: doubled each time, and up to half of it is left out by chance.
const BACK_OFF: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// What a switch is run with.
#[derive(Clone, Debug)]
pub struct SwitchConfig {
    /// Where controllers listen.
    pub controllers: Controllers,
    /// The switch's name: one for each switch of a controller.
    pub name: String,
    /// Address, limits and timeouts on the data network.
    pub node: NodeConfig,
    /// How it sends and receives.
    pub driver: Driver,
    /// How many threads serve it, 1 to 16, each with a socket of its own: the nodes of communicators, and of the trees
    /// of one, are divided among them. With more than one, other devices may have its address too.
    pub shards: usize,
    /// Use the kernel's segmentation offload where it has it.
    pub segmentation_offload: bool,
    /// What others look at, if they may.
    pub view: Option<Arc<SwitchView>>,
    /// What it proves to the controller, which must prove it, too.
    pub token: Option<Token>,
    /// TLS with the controller, which needs it then.
    pub tls: Option<CallerTls>,
}

impl SwitchConfig {
    /// The defaults.
    pub fn new(controllers: impl Into<Controllers>, name: impl Into<String>, bind: IpAddr) -> Self {
        Self {
            controllers: controllers.into(),
            name: name.into(),
            node: NodeConfig::new(bind, crate::seed()),
            driver: Driver::default(),
            shards: 1,
            segmentation_offload: true,
            view: None,
            token: None,
            tls: None,
        }
    }
}

/// Why a switch does not run (any more).
#[derive(Debug, Error)]
pub enum RunError {
    /// The runtime did not start.
    #[error("the runtime cannot start")]
    Runtime(#[source] io::Error),
    /// The device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The controller does not want this switch.
    #[error("the controller at {controller} refuses this switch: {reason}")]
    Refused {
        /// The controller.
        controller: SocketAddr,
        /// Why.
        reason: Refusal,
    },
    /// The device failed.
    #[error(transparent)]
    DataPlane(#[from] Failure),
}

/// Runs a switch until `shutdown` is over. `ready` is called with its address on the data network
/// once the controller knows it. A controller that cannot be reached is tried again for ever.
pub fn run(
    config: SwitchConfig,
    ready: impl FnOnce(IpAddr),
    shutdown: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let served = async {
        let mut shutdown = pin!(shutdown);
        if crate::is_over(shutdown.as_mut()).await {
            return Ok(());
        }
        let mut switch = Switch {
            data_plane: DataPlane::open(&config)?,
            search: Search::new(config.controllers.clone()),
            config,
            nodes: HeldNodes::new(crate::seed()),
            started: Instant::now(),
            ready: Some(ready),
            registered: false,
        };
        if let Some(view) = &switch.config.view {
            view.watch(switch.data_plane.shared());
        }
        tokio::select! {
            () = &mut shutdown => Ok(()),
            error = switch.serve() => Err(error),
        }
    };
    crate::block_on(served).map_err(RunError::Runtime)?
}

/// Why a session with the controller ended.
#[derive(Debug, Error)]
enum SessionEnd {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it takes no messages: its process or its network stands still")]
    Silent,
    #[error("it says nothing: its process or its network stands still")]
    Mute,
    #[error(transparent)]
    Term(#[from] TermError),
    #[error("it sent what a switch does not understand: {0}")]
    Nonsense(String),
    #[error("it refuses this switch: {0}")]
    Refused(Refusal),
    #[error("TLS with it failed: {0}")]
    Tls(String),
    #[error("{0}")]
    Token(TokenError),
    #[error(transparent)]
    DataPlane(Failure),
}

struct Switch<F> {
    config: SwitchConfig,
    search: Search,
    data_plane: DataPlane,
    nodes: HeldNodes,
    started: Instant,
    /// Taken when the controller has registered us for the first time.
    ready: Option<F>,
    /// The controller of this session knows us.
    registered: bool,
}

impl<F: FnOnce(IpAddr)> Switch<F> {
    /// One session after the other.
    async fn serve(&mut self) -> RunError {
        let [mut pause, longest] = BACK_OFF;
        let mut attempts = 0_u64;
        loop {
            self.registered = false;
            let controller = self.search.current();
            let others = match self.session().await {
                Ok(never) => match never {},
                Err(SessionEnd::DataPlane(failure)) => return failure.into(),
                // Later it may be our own old connection that is in the way.
                Err(SessionEnd::Refused(reason))
                    if self.ready.is_some()
                        && !self.is_in_the_way(&reason)
                        && !reason.is_for_now() =>
                {
                    return RunError::Refused { controller, reason };
                }
                Err(end) => {
                    self.nodes.recall(self.started.elapsed());
                    if self.registered {
                        (pause, attempts) = (BACK_OFF[0], 0);
                    }
                    let is_pause = match &end {
                        SessionEnd::Refused(Refusal::NotLeader { leader, .. }) => {
                            self.search.follow(*leader)
                        }
                        _ => self.search.advance(),
                    };
                    // One that takes switches and lets them go is not to be asked without a pause.
                    let others = !is_pause && !self.registered;
                    attempts += 1;
                    // Ever rarer: it may be away for days.
                    if attempts.is_power_of_two() {
                        tracing::warn!(%controller, %end, attempts, "no controller; trying again");
                    } else {
                        tracing::debug!(%controller, %end, attempts, "no controller; trying again");
                    }
                    others
                }
            };
            if others {
                continue;
            }
            let part = (crate::seed() % 1024) as u32;
            if let Err(failure) = self.wait(pause - pause * part / 2048).await {
                return failure.into();
            }
            pause = (pause * 2).min(longest);
        }
    }

    /// Whether the connection of an earlier process of this switch is the reason. It closes, or is given up.
    fn is_in_the_way(&self, reason: &Refusal) -> bool {
        let Refusal::SwitchTaken { name, address, .. } = reason else { return false };
        *name == self.config.name && *address == self.data_plane.address()
    }

    /// Lets time pass without a controller. What happens meanwhile the next one is told.
    async fn wait(&mut self, pause: Duration) -> Result<(), Failure> {
        let mut pause = pin!(sleep(pause));
        loop {
            tokio::select! {
                () = &mut pause => return Ok(()),
                event = self.data_plane.next_event() => {
                    self.happened(event)?;
                }
            }
        }
    }

    async fn session(&mut self) -> Result<Infallible, SessionEnd> {
        let connecting = TcpStream::connect(self.search.current());
        let patience = match self.search.has_others() {
            true => CONNECT_TIMEOUT_OF_SEVERAL,
            false => CONNECT_TIMEOUT,
        };
        let connected = timeout(patience, connecting).await;
        let stream = connected.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        crate::set_up(&stream)?;
        let called = stream.peer_addr()?;
        let patience = match self.search.has_others() {
            true => SILENCE[0],
            false => PROOF_TIMEOUT,
        };
        let admitted = timeout(patience, crate::tls::call(stream, self.config.tls.as_ref()));
        let stream = admitted.await.map_err(|_| SessionEnd::Silent)?.map_err(end_of)?;
        let (reader, mut writer) = tokio::io::split(stream);
        let mut reader = MessageReader::new(reader);
        if let Some(token) = self.config.token {
            let proof = prove(token, called, &mut reader, &mut writer);
            timeout(patience, proof).await.map_err(|_| SessionEnd::Silent)??;
        }
        for message in self.introduction() {
            send(&mut writer, &message).await?;
        }
        let mut heard = Instant::now();
        loop {
            let silence = SILENCE[usize::from(self.registered)];
            let answer = tokio::select! {
                message = reader.next() => {
                    heard = Instant::now();
                    let Commanded { term, message } = message?;
                    self.nodes.obey(term)?;
                    match message {
                        FromController::ReadCounters => {
                            for counters in self.counters().map_err(SessionEnd::DataPlane)? {
                                send(&mut writer, &counters).await?;
                            }
                            None
                        }
                        message => self.told(message)?,
                    }
                }
                event = self.data_plane.next_event() => {
                    self.happened(event).map_err(SessionEnd::DataPlane)?
                }
                () = sleep_until(heard + silence), if self.search.has_others() => {
                    return Err(SessionEnd::Mute);
                }
            };
            if let Some(answer) = answer {
                send(&mut writer, &answer).await?;
            }
            if self.registered {
                self.tell(&mut writer).await?;
            }
        }
    }

    /// Who this is, what it has to tell, and what it holds.
    fn introduction(&self) -> Vec<ToController> {
        let (name, address) = (self.config.name.clone(), self.data_plane.address());
        let NodeConfig { max_communicators, max_memory, .. } = self.config.node;
        let limits = SwitchLimits {
            communicators: max_communicators,
            memory_bytes: max_memory,
            queue_pairs: self.data_plane.queue_pairs(),
        };
        self.nodes.introduction(name, address, limits)
    }

    /// Tells why communicators end. What could not be told is kept.
    async fn tell(&mut self, writer: &mut Writer) -> Result<(), SessionEnd> {
        while let Some((communicator, report)) = self.nodes.next_untold() {
            send(writer, &ToController::Report { communicator, report }).await?;
            self.nodes.told(communicator, self.started.elapsed());
        }
        Ok(())
    }

    /// Does what the controller says; returns the answer.
    fn told(&mut self, message: FromController) -> Result<Option<ToController>, SessionEnd> {
        let spec = CommunicatorSpec::asked_for(&message);
        Ok(match message {
            FromController::Ping => Some(ToController::Pong),
            // Answered by the session, by as many messages as there are nodes.
            FromController::ReadCounters => None,
            FromController::Registered => {
                self.registered();
                None
            }
            FromController::CreateCommunicator { .. } => {
                spec.map(|spec| self.create(&spec, &message))
            }
            FromController::ConnectParent { communicator, address, qpn, psn, receive_share } => {
                let parent = ParentSpec { address, qpn, psn, receive_share };
                Some(self.connect_parent(communicator, &parent))
            }
            FromController::DestroyCommunicator { communicator } => self.destroy(communicator),
            FromController::AbortCommunicator { communicator, rank } => {
                // Destroyed when all have heard.
                self.data_plane.abort(communicator, Abort::PeerLost { rank });
                None
            }
            FromController::EndCommunicator { communicator } => {
                self.data_plane.abort(communicator, Abort::Requested { code: UNCLAIMED });
                None
            }
            FromController::Refused { reason } => return Err(SessionEnd::Refused(reason)),
            FromController::Controllers { controllers } => {
                self.search.learn(&controllers);
                let controllers = self.search.known();
                tracing::debug!(%controllers, "these controllers are known");
                None
            }
            message @ (FromController::Resumed
            | FromController::GroupReady { .. }
            | FromController::Waiting { .. }
            | FromController::Plan(_)
            | FromController::SharedMemory(_)
            | FromController::Left { .. }
            | FromController::Token { .. }
            | FromController::Abort { .. }
            | FromController::Closed) => {
                return Err(SessionEnd::Nonsense(shortened(format!("{message:?}"))));
            }
        })
    }

    /// What the nodes have counted that the controller has asked for.
    fn counters(&self) -> Result<Vec<ToController>, Failure> {
        let (at_ns, counts) = self.data_plane.counts()?;
        let message = |it: CommunicatorCounts| ToController::Counters {
            communicator: it.communicator,
            at_ns,
            collectives: it.statistics.collectives,
            ports: it.ports.iter().map(port_counters).collect(),
        };
        Ok(counts.into_iter().map(message).collect())
    }

    /// The controller knows what there is from before.
    fn registered(&mut self) {
        tracing::info!(name = self.config.name, "registered");
        self.registered = true;
        self.search.found();
        if let Some(ready) = self.ready.take() {
            ready(self.data_plane.address());
        }
    }

    /// What is said where packets to some neighbours of a node are shorter than its path MTU.
    fn too_long(
        &self,
        communicator: u64,
        path_mtu: Mtu,
        neighbours: impl Iterator<Item = IpAddr>,
    ) -> Option<ToController> {
        let ways = neighbours.filter_map(|other| Some((self.path_mtu(other)?, other)));
        let failed = packets_too_long(communicator, path_mtu, self.data_plane.address(), ways);
        if failed.is_some() {
            tracing::info!(communicator, ?failed, "not made");
        }
        failed
    }

    /// The largest path MTU to a neighbour, where the system knows a way.
    fn path_mtu(&self, neighbour: IpAddr) -> Option<Mtu> {
        let link = millstream_net::address::path_mtu(self.data_plane.address(), neighbour);
        // Who cannot be reached is told as lost later.
        Mtu::fitting(link.ok()?)
    }

    fn create(&mut self, spec: &CommunicatorSpec, message: &FromController) -> ToController {
        let communicator = spec.id;
        let neighbours = spec.children.iter().map(|child| child.address);
        if let Some(failed) = self.too_long(communicator, spec.path_mtu, neighbours) {
            return failed;
        }
        match self.data_plane.create(spec) {
            Ok(created) => {
                self.nodes.made(message);
                created.message(communicator)
            }
            Err(error) => {
                tracing::warn!(communicator, %error, "not created");
                let reason = shortened(error.to_string());
                ToController::CommunicatorFailed { communicator, reason, path_mtu: None }
            }
        }
    }

    /// Connects a communicator to the node above. When that fails, nothing is left of it, as of one that
    /// was not made.
    fn connect_parent(&mut self, communicator: u64, parent: &ParentSpec) -> ToController {
        if let Some(path_mtu) = self.nodes.path_mtu(communicator)
            && let above = [parent.address].into_iter()
            && let Some(failed) = self.too_long(communicator, path_mtu, above)
        {
            self.destroy(communicator);
            return failed;
        }
        match self.data_plane.connect_parent(communicator, parent) {
            Ok(()) => {
                self.nodes.connected(communicator, parent.address);
                ToController::ParentConnected { communicator }
            }
            Err(error) => {
                tracing::warn!(communicator, parent = %parent.address, %error, "not connected");
                if self.nodes.remove(communicator) {
                    self.data_plane.destroy(communicator);
                }
                let address = parent.address;
                let reason = format!("it cannot be connected to the one at {address}: {error}");
                let reason = shortened(reason);
                ToController::CommunicatorFailed { communicator, reason, path_mtu: None }
            }
        }
    }

    /// Removes a communicator; returns what the controller should know.
    fn destroy(&mut self, communicator: u64) -> Option<ToController> {
        self.nodes.remove(communicator).then(|| {
            self.data_plane.destroy(communicator);
            ToController::CommunicatorDestroyed { communicator }
        })
    }

    /// Acts on what the node reports; returns what the controller should know.
    fn happened(&mut self, event: Option<SwitchEvent>) -> Result<Option<ToController>, Failure> {
        let Some(event) = event else {
            let closed = Failure::Closed { address: self.data_plane.address() };
            return Err(self.data_plane.failure().unwrap_or(closed));
        };
        tracing::info!(?event, "the switch reports");
        if let SwitchEvent::Aborted { communicator, .. } = event {
            return Ok(self.destroy(communicator));
        }
        self.nodes.happened(&event);
        Ok(None)
    }
}

/// Why a session ends when its connection fails: where the controller does not like a certificate, it says so after the
/// handshake.
fn end_of(error: io::Error) -> SessionEnd {
    match millstream_net::tls::reason(&error) {
        Some(reason) => SessionEnd::Tls(reason),
        None => SessionEnd::Io(error),
    }
}

/// Has both ends prove that they have the token. Nothing that is said meanwhile is obeyed, not even a term.
async fn prove(
    token: Token,
    called: SocketAddr,
    reader: &mut MessageReader<ReadHalf<Called>>,
    writer: &mut Writer,
) -> Result<(), SessionEnd> {
    let mut initiator = Initiator::new(token, Purpose::Control, called, None)?;
    let mut body = initiator.opening();
    loop {
        send(writer, &ToController::Token { body }).await?;
        let said = loop {
            match reader.next::<Commanded>().await?.message {
                FromController::Token { body } => break body,
                FromController::Ping => send(writer, &ToController::Pong).await?,
                FromController::Refused { reason } => return Err(SessionEnd::Refused(reason)),
                _ => return Err(SessionEnd::Token(TokenError::NoProof)),
            }
        };
        match initiator.take(&said).map_err(SessionEnd::Token)? {
            Some(next) => body = next,
            None => return Ok(()),
        }
    }
}

async fn send(writer: &mut Writer, message: &ToController) -> Result<(), SessionEnd> {
    let frame = encode(message).map_err(ReadError::from)?;
    let write = async {
        writer.write_all(&frame).await?;
        // Over TLS it may wait here, where the network does not take all of it at once.
        writer.flush().await
    };
    let written = timeout(WRITE_TIMEOUT, write).await;
    Ok(written.map_err(|_| SessionEnd::Silent)??)
}
