//! The API: one rank of a group.

use std::any::Any;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millstream_inc::protocol::{AbortReason, Failover, ToController};
use millstream_inc::{CollectiveCall, DataType, Mode, ReduceOperation, Stripe};

use crate::call::{Call, Shape};
use crate::control::{Sender, given_up};
use crate::failover::{self, FailoverReport, Host};
use crate::hosted::HostedSwitch;
use crate::join::{self, JoinConfig, Joined, Waiting};
use crate::joining::{IsTaken, is_rank_taken};
use crate::local::Forming;
use crate::memory::{Borrowed, Buffer, Domains, Operands, Pending, Span};
use crate::path::{Route, Way};
use crate::raw::RawCall;
use crate::registrations::Registrations;
use crate::tree::Work;
use crate::watcher::Watcher;
use crate::{CollectiveError, Element, JoinError};

/// How long a rank that is done waits for the others, so that the switch does not take it for
/// dead while others still wait for results.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

/// How long a rank that is done and has a switch waits until all have their results from there: for longer than a rank
/// may be silent before it is lost.
pub(crate) const SETTLING: Duration = Duration::from_secs(6);

/// Distinguishes the communicators of a process.
static NEXT_OWNER: AtomicU64 = AtomicU64::new(0);

/// One rank of a group, connected to its switch.
///
/// Every rank calls the same collectives in the same order. Dropping it leaves the group; a rank
/// that is done waits up to a second for the others.
pub struct Communicator {
    way: Way,
    sender: Arc<Sender>,
    domains: Domains,
    owner: u64,
    config: JoinConfig,
    /// Of each tree; none where ranks share memory.
    switches: Vec<(String, IpAddr)>,
    /// Why the ranks' own processes take the place of switches, if they do.
    fallback: Option<String>,
    /// That of this process.
    hosted: Option<Arc<HostedSwitch>>,
    mode: Mode,
    registrations: Registrations,
    /// The number of the collective that was started, and its buffer.
    pending: Option<(u64, Box<dyn Any + Send + Sync>)>,
    /// None where trees that replace others have each their own.
    _watcher: Option<Watcher>,
}

impl Communicator {
    /// Joins a group: returns when all its ranks have, and a switch serves them. When somebody is this rank already, from the
    /// same address, waits up to 6 s for the end of that: it may be the same one, and its machine have been reset.
    pub fn join(config: &JoinConfig) -> Result<Self, JoinError> {
        Self::join_reporting(config, |_| {})
    }

    /// As [`Communicator::join`]. Calls `waiting` about every second while something is missing, with what it is, and more often
    /// at first while somebody else is this rank.
    pub fn join_reporting(
        config: &JoinConfig,
        mut waiting: impl FnMut(&Waiting),
    ) -> Result<Self, JoinError> {
        Self::join_when_free(config, is_rank_taken, &mut waiting)
    }

    /// As above. The refusals that are waited out are those for which `is_taken` holds.
    pub(crate) fn join_when_free(
        config: &JoinConfig,
        is_taken: IsTaken,
        waiting: &mut dyn FnMut(&Waiting),
    ) -> Result<Self, JoinError> {
        let joined = join::join(config, is_taken, waiting)?;
        let (domains, sender) = (joined.domains.clone(), Arc::clone(&joined.sender));
        let (switches, fallback) = (joined.switches.clone(), joined.fallback.clone());
        let hosted = joined.hosted.clone();
        let (way, watcher) = way(config, joined)?;
        Ok(Self {
            way,
            sender,
            domains,
            owner: NEXT_OWNER.fetch_add(1, Ordering::Relaxed),
            config: config.clone(),
            switches,
            fallback,
            hosted,
            mode: Mode::Write,
            registrations: Registrations::default(),
            pending: None,
            _watcher: watcher,
        })
    }

    /// Which rank this is.
    pub fn rank(&self) -> u32 {
        self.config.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> u32 {
        self.config.world
    }

    /// By which way collectives go.
    pub fn route(&self) -> Route {
        self.way.route()
    }

    /// The ranks of this host that share memory, this one included, in their order; none where they go over switches each
    /// for itself. With [`Route::Hosts`] the first of them is connected to switches for all of them.
    pub fn sharing(&self) -> &[u32] {
        self.way.sharing()
    }

    /// Name and address of the switch; where there are several trees, that of the first. `None` where the ranks are of
    /// one machine and share memory, and where another rank of this host is connected for this one.
    pub fn switch(&self) -> Option<(&str, IpAddr)> {
        self.switches().next()
    }

    /// Name and address of the switch that each tree connects this rank to: one for each of its devices that has a
    /// tree, in their order. They are those that it began with, also when they are lost ([`Communicator::failovers`]).
    pub fn switches(&self) -> impl Iterator<Item = (&str, IpAddr)> {
        self.switches.iter().map(|(name, address)| (&**name, *address))
    }

    /// Why no switch serves the group, where the ranks' own processes take the place of switches
    /// ([`JoinConfig::fallback`]). [`Communicator::switches`] are those then.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// How the communicator has gone on over other trees when a switch was lost, each time ([`JoinConfig::fallback`]).
    pub fn failovers(&self) -> Vec<FailoverReport> {
        self.way.failovers()
    }

    /// Why the communicator is of no more use, if so.
    pub fn failure(&self) -> Option<CollectiveError> {
        self.way.failure()
    }

    /// Ends what is under way, and what other threads are about to begin, with [`CollectiveError::Closed`], and tells the
    /// other ranks, whose calls end, too. For who drops it next, and waits for these threads first. Dropping it while
    /// nothing is under way leaves in order.
    pub fn close(&self) {
        self.way.fail(CollectiveError::Closed);
        give_up(&self.way, &self.sender, &CollectiveError::Closed);
    }

    /// By which operations of RDMA vectors travel from now on: WRITE, unless this was called. All ranks
    /// say the same.
    pub fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    /// Calls a collective. The memory is registered for this call; a [`Buffer`] saves that for sources. A vector
    /// that fits a packet with the descriptor is copied, and nothing is registered.
    /// [`Call`] says what lengths the vectors must have.
    pub fn call<T: Element>(
        &mut self,
        call: Call,
        source: &[T],
        destination: &mut [T],
    ) -> Result<(), CollectiveError> {
        let shape = call.shape(self.rank(), self.world(), source.len(), destination.len())?;
        if self.is_copied::<T>(call, &shape) {
            let source = &source[shape.source.clone()];
            return self.run_copied(
                call,
                &shape,
                source,
                &mut destination[shape.destination.clone()],
            );
        }
        let memory = Borrowed::apart(&self.domains, self.mode, &shape, source, destination)?;
        self.run::<T>(call, &shape, memory.operands(), memory.spans())
    }

    /// Calls a collective in place. After an error the vector is a mixture.
    pub fn call_in_place<T: Element>(
        &mut self,
        call: Call,
        vector: &mut [T],
    ) -> Result<(), CollectiveError> {
        let shape = call.shape_in_place(self.rank(), self.world(), vector.len())?;
        if self.is_copied::<T>(call, &shape) {
            return self.run_copied_in_place(call, &shape, vector);
        }
        let memory = Borrowed::in_place(&self.domains, self.mode, &shape, vector)?;
        self.run::<T>(call, &shape, memory.operands(), memory.spans())
    }

    /// Calls a collective between registered vectors.
    pub fn call_buffers<T: Element>(
        &mut self,
        call: Call,
        source: &Buffer<T>,
        destination: &mut Buffer<T>,
    ) -> Result<(), CollectiveError> {
        self.check_owner(source)?;
        self.check_owner(destination)?;
        let shape = call.shape(self.rank(), self.world(), source.len(), destination.len())?;
        if self.is_copied::<T>(call, &shape) {
            let source = &source[shape.source.clone()];
            return self.run_copied(
                call,
                &shape,
                source,
                &mut destination[shape.destination.clone()],
            );
        }
        // SAFETY: borrowed, the destination exclusively, until this returns, and the window ends before.
        let (window, spans) = unsafe {
            let window = destination.open(&self.domains, self.mode, &shape.destination)?;
            (window, [source.span(&shape.source), destination.span(&shape.destination)])
        };
        let operands =
            Operands { source: source.source(&shape.source), destination: window.operand() };
        self.run::<T>(call, &shape, operands, spans)
    }

    /// Calls a collective in place of a registered vector. After an error the vector is a mixture.
    pub fn call_buffer_in_place<T: Element>(
        &mut self,
        call: Call,
        vector: &mut Buffer<T>,
    ) -> Result<(), CollectiveError> {
        self.check_owner(vector)?;
        let shape = call.shape_in_place(self.rank(), self.world(), vector.len())?;
        if self.is_copied::<T>(call, &shape) {
            return self.run_copied_in_place(call, &shape, vector);
        }
        // SAFETY: borrowed exclusively until this returns, and the window ends before.
        let (window, spans) = unsafe {
            let window = vector.open(&self.domains, self.mode, &shape.destination)?;
            (window, [vector.span(&shape.source), vector.span(&shape.destination)])
        };
        let operands = vector.operands_in_place(&shape, &window);
        self.run::<T>(call, &shape, operands, spans)
    }

    /// A vector of zeros that is registered as a source once and for all, and as a destination by each call that
    /// writes to it.
    pub fn allocate<T: Element>(&self, length: usize) -> Result<Buffer<T>, CollectiveError> {
        Ok(Buffer::new(&self.domains, length, self.owner)?)
    }

    /// Starts a collective, in place, and returns at once. [`Communicator::wait`] gives the buffer
    /// back. When it cannot be started, the buffer comes back with the reason.
    pub fn start<T: Element>(
        &mut self,
        call: Call,
        buffer: Buffer<T>,
    ) -> Result<(), (Buffer<T>, CollectiveError)> {
        let shape = self
            .check_owner(&buffer)
            .and_then(|()| call.shape_in_place(self.rank(), self.world(), buffer.len()));
        let shape = match shape {
            Ok(shape) => shape,
            Err(error) => return Err((buffer, error)),
        };
        if let Err(error) = self.check_idle() {
            return Err((buffer, error));
        }
        let copied = self.is_copied::<T>(call, &shape);
        let pending = match copied {
            true => Pending::copied(buffer),
            false => Pending::new(buffer, &self.domains, self.mode, &shape)
                .map_err(|(buffer, error)| (buffer, CollectiveError::from(error)))?,
        };
        let spans = [pending.span(&shape.source), pending.span(&shape.destination)];
        let operands = (!copied).then(|| pending.operands());
        match self.begin::<T>(call, &shape, operands, spans, true) {
            Ok(sequence) => {
                self.pending = Some((sequence, Box::new(pending)));
                Ok(())
            }
            Err(error) => Err((pending.close(), error)),
        }
    }

    /// The result of what was started, if it is there.
    pub fn test<T: Element>(&mut self) -> Result<Option<Buffer<T>>, CollectiveError> {
        self.wait(Duration::ZERO)
    }

    /// The result of what was started, if it comes within `timeout`. `None` means that it has not,
    /// and may yet.
    pub fn wait<T: Element>(
        &mut self,
        timeout: Duration,
    ) -> Result<Option<Buffer<T>>, CollectiveError> {
        let started = self.pending.as_ref().filter(|(_, pending)| pending.is::<Pending<T>>());
        let &(sequence, _) = started.ok_or(CollectiveError::NotStarted)?;
        let Some(outcome) = self.way.wait(sequence, timeout) else { return Ok(None) };
        let pending = self.pending.take().and_then(|(_, pending)| pending.downcast().ok());
        let buffer = pending.map(|pending: Box<Pending<T>>| pending.close());
        self.ended(outcome)?;
        Ok(buffer)
    }

    /// Nothing was started that has to be waited for.
    fn check_idle(&self) -> Result<(), CollectiveError> {
        self.pending.as_ref().map_or(Ok(()), |(sequence, _)| Err(CollectiveError::Busy(*sequence)))
    }

    fn check_owner<T: Element>(&self, buffer: &Buffer<T>) -> Result<(), CollectiveError> {
        match buffer.owner() == self.owner {
            true => Ok(()),
            false => Err(CollectiveError::ForeignBuffer),
        }
    }

    /// Starts a collective; gives its number. A vector that is copied has no operands. What is `unattended` goes on
    /// though nobody waits for it.
    fn begin<T: Element>(
        &self,
        call: Call,
        shape: &Shape,
        operands: Option<Operands>,
        [source, destination]: [Span; 2],
        unattended: bool,
    ) -> Result<u64, CollectiveError> {
        self.check_idle()?;
        let registered = operands.is_some();
        let operands = operands.unwrap_or_default();
        let call = self.request::<T>(call, shape, &operands);
        let limit = self.config.call_timeout;
        let work = Work { call, operands, registered, source, destination, limit };
        self.way.start(&work, unattended)
    }

    /// Calls a collective whose vector travels with the descriptor: it is copied.
    fn run_copied<T: Element>(
        &self,
        call: Call,
        shape: &Shape,
        source: &[T],
        destination: &mut [T],
    ) -> Result<(), CollectiveError> {
        // SAFETY: borrowed until this returns, when the collective is over.
        let spans = unsafe { [Span::of_source(source), Span::of_destination(destination)] };
        let sequence = self.begin::<T>(call, shape, None, spans, false)?;
        self.finish(sequence)
    }

    /// As above, where source and destination are parts of one vector.
    fn run_copied_in_place<T: Element>(
        &self,
        call: Call,
        shape: &Shape,
        vector: &mut [T],
    ) -> Result<(), CollectiveError> {
        // SAFETY: borrowed until this returns, when the collective is over.
        let spans = unsafe { Span::of_parts(vector, shape) };
        let sequence = self.begin::<T>(call, shape, None, spans, false)?;
        self.finish(sequence)
    }

    fn is_copied<T: Element>(&self, call: Call, shape: &Shape) -> bool {
        self.way.copies(&self.request::<T>(call, shape, &Operands::default()))
    }

    /// A call as the switch must know it.
    fn request<T: Element>(
        &self,
        call: Call,
        shape: &Shape,
        operands: &Operands,
    ) -> CollectiveCall {
        request(call, call.data_type::<T>(), shape.count, self.mode, operands)
    }

    /// As above.
    pub(crate) fn raw_request(&self, call: &RawCall, operands: &Operands) -> CollectiveCall {
        let RawCall { call, data_type, count, mode, .. } = *call;
        let (data_type, count) = match call {
            // As `Call::data_type`.
            Call::Barrier => (DataType::UInt8, 0),
            _ => (data_type, count),
        };
        request(call, data_type, count, mode, operands)
    }

    pub(crate) fn way(&self) -> &Way {
        &self.way
    }

    pub(crate) fn sender(&self) -> &Arc<Sender> {
        &self.sender
    }

    pub(crate) fn domains(&self) -> &Domains {
        &self.domains
    }

    pub(crate) fn registrations(&self) -> &Registrations {
        &self.registrations
    }

    pub(crate) fn call_timeout(&self) -> Duration {
        self.config.call_timeout
    }

    pub(crate) fn set_call_timeout(&mut self, timeout: Duration) {
        self.config.call_timeout = timeout;
    }

    /// Starts a collective and waits for its end. When this returns, the operands are the
    /// caller's again.
    fn run<T: Element>(
        &mut self,
        call: Call,
        shape: &Shape,
        operands: Operands,
        spans: [Span; 2],
    ) -> Result<(), CollectiveError> {
        let sequence = self.begin::<T>(call, shape, Some(operands), spans, false)?;
        self.finish(sequence)
    }

    /// Waits for the end of a collective.
    fn finish(&self, sequence: u64) -> Result<(), CollectiveError> {
        loop {
            // Ends by itself, with an error when its time is up.
            if let Some(outcome) = self.way.wait(sequence, Duration::MAX) {
                return self.ended(outcome);
            }
        }
    }

    /// The switch of this process that there is now.
    fn hosted(&self) -> Option<Arc<HostedSwitch>> {
        self.way.hosted().or_else(|| self.hosted.clone())
    }

    fn ended(&self, outcome: Result<(), CollectiveError>) -> Result<(), CollectiveError> {
        report(&self.way, &self.sender, &outcome);
        outcome
    }
}

/// What does the collectives of a rank that has joined. It has its own connection to the controller, or this watches it.
fn way(config: &JoinConfig, mut joined: Joined) -> Result<(Way, Option<Watcher>), JoinError> {
    let forming = joined.forming.take();
    match (joined.failover, forming) {
        (Failover::Off, None) => Ok((joined.way, Some(joined.watcher))),
        (Failover::Off, Some(forming)) => {
            let way = Way::SharedMemory(Arc::clone(&forming.local));
            let wire = forming.local.wire().cloned();
            form(&way, &joined.sender, &forming, wire, &joined.domains)?;
            Ok((way, Some(joined.watcher)))
        }
        (Failover::Reproducible | Failover::On, None) => {
            let failover = failover::Failover::start(config, joined, None);
            Ok((Way::Failover(failover.map_err(JoinError::Thread)?), None))
        }
        (Failover::Reproducible | Failover::On, Some(forming)) => {
            let (sender, domains) = (Arc::clone(&joined.sender), joined.domains.clone());
            let host = Host::start(config, joined, &forming.local).map_err(JoinError::Thread)?;
            let way = Way::Host(Arc::new(host));
            let wire = forming.local.wire().cloned();
            form(&way, &sender, &forming, wire, &domains)?;
            Ok((way, None))
        }
    }
}

/// Has the ranks of the host share memory, or gives up.
fn form(
    way: &Way,
    sender: &Sender,
    forming: &Forming,
    wire: Option<Way>,
    domains: &Domains,
) -> Result<(), JoinError> {
    forming.form(wire, domains, |error| {
        give_up(way, sender, error);
        way.disconnect();
    })
}

/// A call as the switch must know it.
fn request(
    call: Call,
    data_type: DataType,
    count: usize,
    mode: Mode,
    operands: &Operands,
) -> CollectiveCall {
    let Operands { source, destination } = operands;
    CollectiveCall {
        collective: call.collective(),
        // Where nothing is combined, all ranks must say the same all the same.
        operation: call.operation().unwrap_or(ReduceOperation::Sum),
        data_type,
        root: call.root().unwrap_or(0),
        count: count as u64,
        stripe: Stripe::WHOLE,
        mode,
        // Each tree's device has its own keys.
        source_key: 0,
        source_address: source.address,
        destination_key: 0,
        destination_address: destination.address,
    }
}

/// Tells the controller of a failure that only this rank may know of. The others hear of it.
pub(crate) fn report(way: &Way, sender: &Sender, outcome: &Result<(), CollectiveError>) {
    let current = way.sender();
    let sender = current.as_deref().unwrap_or(sender);
    if let Some(engine) = way.local() {
        let Err(error) = outcome else { return };
        if engine.failure().is_none() {
            return;
        }
        let is_of_switch = match error {
            CollectiveError::SwitchLost { .. } => true,
            // Of a rank of another host, whom the switch or the ranks of that host miss.
            CollectiveError::PeerLost { rank, .. } | CollectiveError::Mismatch { rank, .. } => {
                engine.members().place(*rank).is_none()
            }
            CollectiveError::Overdue { ranks, .. } => {
                ranks.first().is_some_and(|rank| engine.members().place(*rank).is_none())
            }
            _ => false,
        };
        if !is_of_switch {
            // There is no switch that would tell the controller.
            let cause = engine.cause(error);
            return give_up_for(way, sender, error, cause);
        }
        if engine.wire().is_none() {
            return way.wait_released();
        }
    }
    if let Err(CollectiveError::Overdue { ranks, .. }) = outcome
        && !ranks.is_empty()
    {
        // The switch tells the controller. So that the name is free when the caller tries again.
        way.wait_released();
    } else if let Err(error @ CollectiveError::SwitchLost { detail, .. }) = outcome {
        // Of one further up, the switch tells the controller.
        if !error.is_loss_further_up() {
            sender.say_switch_lost(error, detail.clone(), way.failed_tree());
        }
        way.wait_released();
    } else if let Err(error) = outcome
        && matches!(
            error,
            CollectiveError::Timeout { .. }
                | CollectiveError::Overdue { .. }
                | CollectiveError::Protocol(_)
                | CollectiveError::Device(_)
        )
    {
        give_up(way, sender, error);
    }
}

/// Tells the controller that this rank cannot go on.
pub(crate) fn give_up(way: &Way, sender: &Sender, error: &impl fmt::Display) {
    give_up_for(way, sender, error, None);
}

/// As above, because of what is wrong with a rank of this host, if it is that.
fn give_up_for(way: &Way, sender: &Sender, error: &impl fmt::Display, cause: Option<AbortReason>) {
    let current = way.sender();
    let sender = current.as_deref().unwrap_or(sender);
    sender.say_last(given_up(error, cause));
    // So that the name is free when the caller tries again.
    way.wait_released();
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let (collectives, running) = self.way.progress();
        if running {
            self.close();
        } else if self.way.failure().is_none() {
            let sender = self.way.sender().unwrap_or_else(|| Arc::clone(&self.sender));
            sender.say_last(ToController::Leave { collectives });
            self.way.wait_closed(LINGER);
            if let Some(switch) = self.hosted() {
                switch.wait_settled(SETTLING);
            }
        } else {
            // Else the controller takes it for lost, and names it to those who have not missed the other one yet.
            if self.way.failure().is_some_and(|error| error.is_of_one_that_left()) {
                let sender = self.way.sender().unwrap_or_else(|| Arc::clone(&self.sender));
                sender.say_last(ToController::Leave { collectives });
            }
            if let Some(switch) = self.hosted() {
                switch.wait_settled(LINGER);
            }
        }
        // Handles that outlive it keep the connection, by which nothing may arrive any more: what was registered can
        // be freed now.
        self.way.disconnect();
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("group", &self.config.group)
            .field("rank", &self.config.rank)
            .field("world", &self.config.world)
            .field("switches", &self.switches)
            .finish_non_exhaustive()
    }
}
