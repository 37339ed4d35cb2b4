//! The queue pairs of a test, each with its memory.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use millstream_verbs::{
    ATOMIC_LENGTH, Access, Atomicity, Completion, CompletionStatus, Device, Piece, Psn, Qpn,
    QueuePair, QueuePairCapabilities, ReceiveRequest, SendOperation, SendRequest,
};

use super::agreement::Address;
use super::control::Control;
use super::test::{Operation, Plan, Test};
use crate::rdma::completions::Completions;
use crate::rdma::connection::{self, Remote};
use crate::rdma::memory::Buffer;
use crate::rdma::pattern::{Filling, Side};

/// What a target holds before a test, so that bytes that never came are not taken for right.
const NOTHING: u8 = 0xa5;
/// Bytes filled or checked at a time: whole pages.
const CHUNK: usize = 1 << 16;
/// Requests handed to the device at a time.
const POST_MAX: usize = 64;

/// The id of a request says what it is: this bit of the receives, then the lane, then the request's
/// number in its lane, from 1.
const RECEIVE: u64 = 1 << 63;
const LANE_SHIFT: u32 = 48;
const NUMBER_MASK: u64 = (1 << LANE_SHIFT) - 1;

/// Longer than the retries of a dead peer take.
const SILENCE: Duration = Duration::from_secs(2);
/// For the completion that says why others were flushed.
const CAUSE_LIMIT: Duration = Duration::from_millis(200);

pub(super) struct Lanes {
    lanes: Vec<Lane>,
    completions: Completions,
    device: Device,
    test: Test,
    send_depth: u64,
    receive_depth: usize,
    batch: Vec<SendRequest>,
}

struct Lane {
    // Dropped before the memory: no request names it then.
    pair: QueuePair,
    source: Option<Buffer>,
    target: Option<Buffer>,
    psn: Psn,
    /// The peer's memory for this lane.
    remote_key: u32,
    remote_address: u64,
    /// Receives that are posted.
    receives: usize,
}

/// Something that was done.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Done {
    /// The lane's requests up to this number.
    Requests { lane: usize, number: u64 },
    /// A message came.
    Message { lane: usize, length: u32 },
}

impl Lanes {
    /// Makes queue pairs that are not connected.
    pub(super) fn new(device: Device, plan: &Plan) -> anyhow::Result<Self> {
        let count = plan.queue_pairs;
        let needs = plan.test.needs(plan.side);
        if plan.test.operation.is_atomic() && device.attributes().atomicity == Atomicity::None {
            bail!("{} has no atomic operations: use another device", device.name());
        }
        let receive_depth = if needs.receives { plan.receive_depth } else { 0 };
        let capacity = count * (plan.send_depth + receive_depth);
        let completions = Completions::new(&device, capacity, plan.busy_poll)?;
        let domain = device.allocate_protection_domain();
        let capabilities = QueuePairCapabilities::new(plan.send_depth, receive_depth.max(1));
        let lane = |_| {
            let queue = completions.queue();
            let pair = domain.create_queue_pair(queue, queue, capabilities).with_context(|| {
                format!(
                    "cannot make a queue pair of depth {} on {}",
                    plan.send_depth,
                    device.name()
                )
            })?;
            connection::initialize(&pair, needs.remote)?;
            // Each atomic operation that is under way has its own place for the result.
            let slots = if plan.test.operation.is_atomic() { plan.send_depth } else { 1 };
            let memory = |access: Option<Access>| {
                let buffer = |access| Buffer::new(&domain, plan.largest() as usize * slots, access);
                access.map(buffer).transpose()
            };
            anyhow::Ok(Lane {
                pair,
                source: memory(needs.source)?,
                target: memory(needs.target)?,
                psn: connection::initial_psn(),
                remote_key: 0,
                remote_address: 0,
                receives: 0,
            })
        };
        let lanes = (0..count).map(lane).collect::<anyhow::Result<_>>()?;
        let batch = Vec::with_capacity(POST_MAX);
        let (test, send_depth) = (plan.test, plan.send_depth as u64);
        Ok(Self { lanes, completions, device, test, send_depth, receive_depth, batch })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn count(&self) -> usize {
        self.lanes.len()
    }

    /// What the other side must know of each.
    pub(super) fn addresses(&self) -> Vec<Address> {
        let address = |lane: &Lane| {
            let exposed = match self.test.operation {
                Operation::Send => None,
                Operation::Write | Operation::FetchAdd | Operation::CompareSwap => {
                    lane.target.as_ref()
                }
                Operation::Read => lane.source.as_ref(),
            };
            let (key, address) =
                exposed.map_or((0, 0), |buffer| (buffer.remote_key(), buffer.address()));
            Address { qpn: lane.pair.number().value(), psn: lane.psn.value(), key, address }
        };
        self.lanes.iter().map(address).collect()
    }

    /// Connects each to its counterpart. `remote` says what is the same for all.
    pub(super) fn connect(&mut self, theirs: &[Address], remote: &Remote) -> anyhow::Result<()> {
        for (lane, theirs) in self.lanes.iter_mut().zip(theirs) {
            let (qpn, psn) = (Qpn::new(theirs.qpn), Psn::new(theirs.psn));
            connection::connect(&lane.pair, &Remote { qpn, psn, ..*remote }, lane.psn)?;
            (lane.remote_key, lane.remote_address) = (theirs.key, theirs.address);
        }
        Ok(())
    }

    /// Posts `count` requests of `size` bytes, numbered after `posted`; those whose numbers
    /// `signaled` picks complete.
    pub(super) fn request(
        &mut self,
        index: usize,
        size: u32,
        posted: u64,
        count: u64,
        signaled: impl Fn(u64) -> bool,
    ) -> anyhow::Result<()> {
        let lane = &self.lanes[index];
        let (remote_address, remote_key) = (lane.remote_address, lane.remote_key);
        let depth = self.send_depth;
        let operation = |number: u64| match self.test.operation {
            Operation::Send => SendOperation::Send { immediate: None },
            Operation::Write => {
                // The latency of a WRITE ends when the peer's processor learns of it.
                let immediate = self.test.latency.then_some(0);
                SendOperation::Write { remote_address, remote_key, immediate }
            }
            Operation::Read => SendOperation::Read { remote_address, remote_key },
            Operation::FetchAdd => SendOperation::FetchAdd { remote_address, remote_key, add: 1 },
            Operation::CompareSwap => {
                let (compare, swap) = (number - 1, number);
                SendOperation::CompareSwap { remote_address, remote_key, compare, swap }
            }
        };
        let pieces = |number: u64| match (self.test.operation, &lane.source, &lane.target) {
            (Operation::Send | Operation::Write, Some(source), _) => source.pieces(0, size),
            (Operation::Read, _, Some(target)) => target.pieces(0, size),
            (_, _, Some(target)) => target.pieces(slot(number, depth), size),
            _ => [Piece::default()],
        };
        let mut numbers = posted + 1..=posted + count;
        loop {
            self.batch.clear();
            self.batch.extend(numbers.by_ref().take(POST_MAX).map(|number| {
                let id = (index as u64) << LANE_SHIFT | number & NUMBER_MASK;
                let signaled = signaled(number);
                let request = SendRequest::new(id, operation(number), pieces(number));
                SendRequest { signaled, ..request }
            }));
            if self.batch.is_empty() {
                return Ok(());
            }
            let posted = lane.pair.post_send(&self.batch);
            posted.map_err(|(_, error)| error).context("cannot post a request")?;
        }
    }

    /// Posts receives where less than half of them are left.
    pub(super) fn post_receives(&mut self) -> anyhow::Result<()> {
        let depth = self.receive_depth;
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            if lane.receives > depth / 2 {
                continue;
            }
            let pieces = match (self.test.operation, &lane.target) {
                // All into the same memory, as perftest has it.
                (Operation::Send, Some(target)) => target.whole(),
                _ => [Piece::default()],
            };
            let id = RECEIVE | (index as u64) << LANE_SHIFT;
            let requests = [ReceiveRequest { id, pieces }; POST_MAX];
            while lane.receives < depth {
                let count = POST_MAX.min(depth - lane.receives);
                let posted = lane.pair.post_receive(&requests[..count]);
                posted.map_err(|(_, error)| error).context("cannot post a receive")?;
                lane.receives += count;
            }
        }
        Ok(())
    }

    /// Waits until something is done, at most `timeout`, and calls `then` for each.
    pub(super) fn next(
        &mut self,
        timeout: Duration,
        mut then: impl FnMut(Done) -> anyhow::Result<()>,
    ) -> anyhow::Result<bool> {
        let completions = self.completions.next(timeout);
        if completions.is_empty() {
            if let Some(why) = self.device.failure() {
                bail!("{} does not work any more: {why}", self.device.name());
            }
            return Ok(false);
        }
        for completion in completions {
            if completion.status != CompletionStatus::Success {
                let completion = *completion;
                return Err(self.explain(completion));
            }
            let lane = (completion.id & !RECEIVE) >> LANE_SHIFT;
            let lane = usize::try_from(lane).unwrap_or(usize::MAX);
            if completion.id & RECEIVE == 0 {
                then(Done::Requests { lane, number: completion.id & NUMBER_MASK })?;
                continue;
            }
            let state = self.lanes.get_mut(lane).context("a completion of no request")?;
            state.receives = state.receives.saturating_sub(1);
            then(Done::Message { lane, length: completion.length })?;
        }
        Ok(true)
    }

    /// Waits as [`Lanes::next`] does until something is done, as long as the other side is there.
    /// One that died shows by its silence first: the retry count says so, if it owes us an answer.
    pub(super) fn next_from(
        &mut self,
        control: &mut Control,
        patience: Duration,
        mut then: impl FnMut(Done) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        while !self.next(SILENCE, &mut then)? {
            if !self.test.server_sees() {
                control.give_sign(Instant::now());
            }
            if let Some(message) = control.poll()? {
                bail!(
                    "the {} says {} in the middle of the test: it runs another version of millstream",
                    control.peer(),
                    message.name()
                );
            }
            if start.elapsed() > patience {
                return Err(control.nothing_came(patience));
            }
        }
        Ok(())
    }

    /// Why a request failed. Where it was flushed, another one says why.
    fn explain(&mut self, first: Completion) -> anyhow::Error {
        let start = Instant::now();
        let mut cause = first;
        while cause.status == CompletionStatus::Flushed && start.elapsed() < CAUSE_LIMIT {
            let flushed = |it: &&Completion| {
                !matches!(it.status, CompletionStatus::Flushed | CompletionStatus::Success)
            };
            let found = self.completions.next(CAUSE_LIMIT).iter().find(flushed);
            cause = found.copied().unwrap_or(cause);
        }
        let qpn = cause.qpn.value();
        let what = match cause.id & RECEIVE {
            0 => format!("request {} of queue pair {qpn:#08x} failed", cause.id & NUMBER_MASK),
            _ => format!("a receive of queue pair {qpn:#08x} failed"),
        };
        let advice = match cause.status {
            CompletionStatus::RetryExceeded => {
                "; has it ended, or do packets to UDP port 4791 get lost on the way?"
            }
            _ => "",
        };
        anyhow!("{what}: {}{advice}", cause.status)
    }

    /// Checks what the lane's atomic operations with these numbers have returned. Each was to find
    /// what the one before has left.
    pub(super) fn check_results(
        &self,
        index: usize,
        numbers: std::ops::RangeInclusive<u64>,
    ) -> anyhow::Result<()> {
        let target = self.lanes[index].target.as_ref().context("there are no results")?;
        for number in numbers {
            let mut result = [0; ATOMIC_LENGTH as usize];
            target.read(slot(number, self.send_depth), &mut result)?;
            let (found, expected) = (u64::from_ne_bytes(result), number - 1);
            if found != expected {
                bail!("atomic operation {number} found {found}, not {expected}");
            }
        }
        Ok(())
    }

    /// Checks that the counters add up to `operations`; returns how many bytes they are.
    pub(super) fn check_counters(&self, operations: u64) -> anyhow::Result<u64> {
        let mut sum = 0_u64;
        for lane in &self.lanes {
            let mut counter = [0; ATOMIC_LENGTH as usize];
            lane.target.as_ref().context("there is no counter")?.read(0, &mut counter)?;
            sum = sum.wrapping_add(u64::from_ne_bytes(counter));
        }
        if sum != operations {
            bail!("the counters add up to {sum} after {operations} operations");
        }
        Ok(self.lanes.len() as u64 * u64::from(ATOMIC_LENGTH))
    }

    /// Writes what a test of this size moves, and wipes where it goes to.
    pub(super) fn prepare(&self, size: u32, side: Side) -> anyhow::Result<()> {
        if self.test.operation.is_atomic() {
            // Results that never came are not taken for right, and counters start at 0.
            let (byte, length) = match side {
                Side::Client => (NOTHING, ATOMIC_LENGTH as usize * self.send_depth as usize),
                Side::Server => (0, ATOMIC_LENGTH as usize),
            };
            let bytes = vec![byte; length];
            let mut targets = self.lanes.iter().filter_map(|lane| lane.target.as_ref());
            return targets.try_for_each(|target| target.write(0, &bytes));
        }
        let mut chunk = vec![0; CHUNK.min(size as usize)];
        for (index, lane) in self.lanes.iter().enumerate() {
            if let Some(source) = &lane.source {
                let mut filling = filling(side, index, size);
                for (offset, length) in chunks(size) {
                    filling.fill(&mut chunk[..length]);
                    source.write(offset, &chunk[..length])?;
                }
            }
            if let Some(target) = &lane.target {
                chunk.fill(NOTHING);
                for (offset, length) in chunks(size) {
                    target.write(offset, &chunk[..length])?;
                }
            }
        }
        Ok(())
    }

    /// Checks what came from the other side, `theirs`; returns how many bytes.
    pub(super) fn check(&self, size: u32, theirs: Side) -> anyhow::Result<u64> {
        let [mut found, mut expected] = [(); 2].map(|()| vec![0; CHUNK.min(size as usize)]);
        let mut bytes = 0;
        for (index, lane) in self.lanes.iter().enumerate() {
            let Some(target) = &lane.target else { continue };
            let mut filling = filling(theirs, index, size);
            for (offset, length) in chunks(size) {
                let (found, expected) = (&mut found[..length], &mut expected[..length]);
                filling.fill(expected);
                target.read(offset, found)?;
                let mut pairs = expected.iter().zip(found.iter());
                if let Some(at) = pairs.position(|(expected, found)| expected != found) {
                    bail!(
                        "the data are wrong: byte {} of a message of {size} is {:#04x}, not {:#04x}",
                        offset + at,
                        found[at],
                        expected[at]
                    );
                }
                bytes += length as u64;
            }
        }
        Ok(bytes)
    }
}

/// Where the result of an atomic operation goes: each that is under way has its own place.
fn slot(number: u64, send_depth: u64) -> usize {
    ((number - 1) % send_depth) as usize * ATOMIC_LENGTH as usize
}

/// What a message of a lane holds: another one for each lane and size.
fn filling(side: Side, lane: usize, size: u32) -> Filling {
    Filling::new(side, size.rotate_left(8) ^ lane as u32)
}

/// Where the parts of a message begin, and how long they are.
fn chunks(size: u32) -> impl Iterator<Item = (usize, usize)> {
    let size = size as usize;
    (0..size).step_by(CHUNK).map(move |offset| (offset, CHUNK.min(size - offset)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::perf::test::Amount;
    use millstream_verbs::SoftConfig;

    /// Two queue pairs of a server of `write-bw`, on an address that no other test has.
    fn lanes(sizes: &[u32]) -> Lanes {
        let plan = Plan {
            test: Test { operation: Operation::Write, latency: false },
            side: Side::Server,
            sizes: sizes.to_vec(),
            amount: Amount::Iterations(1),
            queue_pairs: 2,
            send_depth: 4,
            receive_depth: 4,
            mtu: None,
            verify: true,
            busy_poll: false,
            timeout: Duration::from_secs(30),
        };
        let address = std::net::Ipv4Addr::new(127, 99, std::process::id() as u8, 1);
        let device = Device::open_soft(&SoftConfig::new(address.into())).unwrap();
        Lanes::new(device, &plan).unwrap()
    }

    #[test]
    fn only_the_right_bytes_in_every_lane_pass() {
        let sizes = [1, 2, 4096, 200_001];
        let lanes = lanes(&sizes);
        for size in sizes {
            lanes.prepare(size, Side::Server).unwrap();
            let nothing_came = lanes.check(size, Side::Client).unwrap_err().to_string();
            assert!(nothing_came.contains("byte 0"), "{nothing_came}");
            for (index, lane) in lanes.lanes.iter().enumerate() {
                assert!(lanes.check(size, Side::Client).is_err());
                let mut message = vec![0; size as usize];
                filling(Side::Client, index, size).fill(&mut message);
                lane.target.as_ref().unwrap().write(0, &message).unwrap();
            }
            assert_eq!(lanes.check(size, Side::Client).unwrap(), 2 * u64::from(size));
            let last = lanes.lanes[1].target.as_ref().unwrap();
            last.write(size as usize - 1, &[NOTHING]).unwrap();
            let wrong = lanes.check(size, Side::Client).unwrap_err().to_string();
            assert!(wrong.contains(&format!("byte {} of", size - 1)), "{wrong}");
        }
    }
}
