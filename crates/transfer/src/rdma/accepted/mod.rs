//! Queue pairs that peers have connected to ours. They only answer: what this engine sends goes
//! over connections that it opened itself.
//!
//! A peer that is killed does not say goodbye. So each is asked now and then whether it is there, by
//! a WRITE of no bytes, which every adapter answers by itself. Who does not answer is forgotten.

#[cfg(test)]
mod sieve;
#[cfg(test)]
#[expect(dead_code, reason = "the next change uses it")]
mod store;

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_metadata::{Gid, HandShakeDesc};
use millstream_verbs::{Completion, CompletionStatus, ReceiveShare, SendOperation, SendRequest};

use super::connection::{Connection, MAX_QUEUE_PAIRS, Peer, Unconnected};
use super::device::LocalDevice;

/// Longer than any host name, port and device name are together.
const MAX_NIC_PATH_LENGTH: usize = 512;

/// The identifiers of questions have this bit, and below it the number of the peer that is asked.
/// Those of other requests have the number of an endpoint there, which is small.
const QUESTION: u64 = 1 << 63;

/// What is added to the acknowledgement timeout for questions: nobody waits for the answer, and a
/// machine that stands still for a moment loses no connection.
const QUESTION_TIMEOUT_MORE: u8 = 1;

/// Who is connected: the peer's NIC and the device here. A peer's NIC is known by its address too:
/// names such as `localhost:12345` are not unique.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Key {
    nic_path: String,
    gid: Gid,
    device: String,
}

struct Entry {
    key: Key,
    connection: Connection,
    /// The peer's queue pairs.
    peer_queue_pairs: Vec<u32>,
    /// What the peer may have in flight to us.
    _receive_share: Option<ReceiveShare>,
    /// It was asked and has not answered yet.
    asked: bool,
}

pub(super) struct Accepted {
    limit: usize,
    acknowledge_timeout: u8,
    interval: Duration,
    entries: Mutex<Entries>,
    /// Peers have come, or no more will.
    changed: Condvar,
    /// Questions that have ended, by the peer's number, and whether there was an answer. It has a
    /// lock of its own, which whoever makes the device's progress can take at any time.
    ended: Mutex<Vec<(u64, bool)>>,
}

#[derive(Default)]
struct Entries {
    /// By number: whom nothing was heard of for the longest time comes first.
    by_number: BTreeMap<u64, Entry>,
    by_key: HashMap<Key, u64>,
    /// The last number that was given.
    last: u64,
    /// Whether it was said that there are as many as may be, since there last were fewer.
    complained: bool,
    stopped: bool,
}

impl Accepted {
    pub(super) fn new(limit: usize, acknowledge_timeout: u8, interval: Duration) -> Self {
        let acknowledge_timeout = (acknowledge_timeout + QUESTION_TIMEOUT_MORE).min(31);
        Self {
            limit,
            acknowledge_timeout,
            interval,
            entries: Mutex::default(),
            changed: Condvar::new(),
            ended: Mutex::default(),
        }
    }

    /// Connects new queue pairs of `device` to those of a peer. A peer that connects again has lost
    /// its earlier connection, which is closed: late packets of it find nobody.
    ///
    /// Returns the reply, without what only the engine knows, or why the request is refused.
    pub(super) fn accept(
        &self,
        device: &LocalDevice,
        request: &HandShakeDesc,
    ) -> Result<HandShakeDesc, String> {
        let Some(gid) = request.local_gid else {
            return Err("the handshake does not say the GID of its sender".to_owned());
        };
        if request.local_nic_path.len() > MAX_NIC_PATH_LENGTH {
            return Err(format!("a NIC path of more than {MAX_NIC_PATH_LENGTH} bytes"));
        }
        let key = Key {
            nic_path: request.local_nic_path.clone(),
            gid,
            device: device.device.name().to_owned(),
        };
        if request.disconnect {
            self.disconnect(&key, &request.qp_num);
            return Ok(HandShakeDesc::default());
        }
        let count = request.qp_num.len();
        if count == 0 || count > MAX_QUEUE_PAIRS {
            return Err(format!(
                "{count} queue pairs between two NICs: 1 to {MAX_QUEUE_PAIRS} are possible"
            ));
        }
        let own_mtu = device.path_mtu(gid.address()).map_err(|error| error.to_string())?;
        let peer = Peer::parse(request, gid.address(), count, own_mtu)?;
        let mut entries = self.lock();
        if entries.remove(&key).is_none() && entries.by_number.len() >= self.limit {
            entries.make_room(self.limit);
        }
        let unconnected =
            Unconnected::new(device, count, 1).map_err(|reason| reason.to_string())?;
        let receive_share = device.device.grant_receive_share(count);
        let reply = HandShakeDesc {
            qp_num: unconnected.numbers(),
            receive_share: receive_share.as_ref().map(ReceiveShare::bytes),
            start_psn: unconnected.start_psn(),
            path_mtu: Some(own_mtu.bytes() as u32),
            ..HandShakeDesc::default()
        };
        let connection = unconnected
            .connect(&peer, self.acknowledge_timeout)
            .map_err(|reason| reason.to_string())?;
        let peer_queue_pairs = request.qp_num.clone();
        entries.insert(Entry {
            key,
            connection,
            peer_queue_pairs,
            _receive_share: receive_share,
            asked: false,
        });
        drop(entries);
        self.changed.notify_all();
        Ok(reply)
    }

    /// Forgets all peers, and takes no more questions.
    pub(super) fn stop(&self) {
        let mut entries = self.lock();
        let forgotten = mem::take(&mut *entries);
        entries.stopped = true;
        drop(entries);
        self.changed.notify_all();
        forgotten.by_number.values().for_each(|entry| entry.connection.close());
    }

    /// Asks peers whether they are there, and forgets those that are not, until `stop`.
    pub(super) fn keep_asking(&self) {
        while self.pause() {
            self.forget_and_ask();
        }
    }

    /// Whether a completion is of a question.
    pub(super) fn is_question(completion: &Completion) -> bool {
        completion.id & QUESTION != 0
    }

    /// A question has ended. On a thread that makes the device's progress.
    pub(super) fn ended(&self, completion: &Completion) {
        let answered = completion.status == CompletionStatus::Success;
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.push((completion.id & !QUESTION, answered));
    }

    /// Waits for an interval with peers in it; `false` when none will come any more.
    fn pause(&self) -> bool {
        let mut entries = self.lock();
        let mut until = Instant::now() + self.interval;
        loop {
            if entries.stopped {
                return false;
            }
            let wait = |entries| self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner);
            if entries.by_number.is_empty() {
                entries = wait(entries);
                until = Instant::now() + self.interval;
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let waited = self.changed.wait_timeout(entries, left);
            (entries, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn forget_and_ask(&self) {
        let ended = mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner));
        let mut entries = self.lock();
        let mut gone = Vec::new();
        for (number, answered) in ended {
            // It may have connected again meanwhile, under another number.
            let Some(mut entry) = entries.take(number) else { continue };
            if answered {
                entry.asked = false;
                entries.insert(entry);
            } else {
                gone.push(entry);
            }
        }
        for (&number, entry) in &mut entries.by_number {
            if !mem::replace(&mut entry.asked, true) && !ask(number, &entry.connection) {
                // Its queue pair has failed, which is an answer too.
                self.ended.lock().unwrap_or_else(PoisonError::into_inner).push((number, false));
            }
        }
        if entries.by_number.len() < self.limit {
            entries.complained = false;
        }
        drop(entries);
        for entry in &gone {
            tracing::debug!(peer = entry.key.nic_path, "does not answer any more: forgotten");
        }
        if !gone.is_empty() {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn disconnect(&self, key: &Key, peer_queue_pairs: &[u32]) {
        let mut entries = self.lock();
        // Not if it has connected again meanwhile.
        let known = entries.by_key.get(key).and_then(|number| entries.by_number.get(number));
        if known.is_some_and(|entry| entry.peer_queue_pairs == peer_queue_pairs) {
            entries.remove(key);
        }
    }
}

impl Entries {
    fn insert(&mut self, entry: Entry) {
        self.last += 1;
        self.by_key.insert(entry.key.clone(), self.last);
        self.by_number.insert(self.last, entry);
    }

    fn take(&mut self, number: u64) -> Option<Entry> {
        let entry = self.by_number.remove(&number)?;
        self.by_key.remove(&entry.key);
        Some(entry)
    }

    fn remove(&mut self, key: &Key) -> Option<Entry> {
        let number = *self.by_key.get(key)?;
        self.take(number)
    }

    /// Forgets whom nothing was heard of for the longest time. If it still serves somebody, that
    /// peer connects again by itself.
    fn make_room(&mut self, limit: usize) {
        let Some((_, entry)) = self.by_number.pop_first() else { return };
        self.by_key.remove(&entry.key);
        let peer = &entry.key.nic_path;
        if mem::replace(&mut self.complained, true) {
            tracing::debug!(peer, "made room");
        } else {
            tracing::warn!(peer, limit, "as many peers are connected as may be: made room");
        }
    }
}

/// Asks a peer whether it is there. `false` when that cannot be asked any more.
fn ask(number: u64, connection: &Connection) -> bool {
    // No memory is touched, so no key is needed (IBTA 9.7.4.1.4).
    let operation = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
    let question = SendRequest::new(QUESTION | number, operation, []);
    // All queue pairs of a connection are of one process.
    connection.queue_pairs.first().is_some_and(|pair| pair.post_send(&[question]).is_ok())
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::{Arc, Weak};
    use std::thread;

    use super::*;
    use crate::RdmaConfig;

    /// An address that no other test has.
    fn address(host: u8) -> IpAddr {
        Ipv4Addr::new(127, 98, std::process::id() as u8, host).into()
    }

    #[test]
    fn a_peer_that_is_gone_is_forgotten_and_one_that_is_there_is_not() {
        let interval = Duration::from_millis(10);
        let accepted = Arc::new(Accepted::new(10, 13, interval));
        let open = |host| {
            let config = RdmaConfig::new(&[address(host)]);
            LocalDevice::open(address(host), &config, Arc::downgrade(&accepted)).unwrap()
        };
        let (ours, theirs) = (open(1), open(2));
        let asking = thread::spawn({
            let accepted = Arc::clone(&accepted);
            move || accepted.keep_asking()
        });
        let gone = HandShakeDesc {
            local_nic_path: "gone:1@nic".to_owned(),
            local_gid: Some(Gid::from_address(address(3))),
            qp_num: vec![17],
            ..HandShakeDesc::default()
        };
        accepted.accept(&ours, &gone).unwrap();
        let unconnected = Unconnected::new(&theirs, 1, 1).unwrap();
        let there = HandShakeDesc {
            local_nic_path: "there:1@nic".to_owned(),
            local_gid: Some(theirs.gid()),
            qp_num: unconnected.numbers(),
            start_psn: unconnected.start_psn(),
            ..HandShakeDesc::default()
        };
        let reply = accepted.accept(&ours, &there).unwrap();
        let mtu = ours.device.path_mtu(address(2)).unwrap();
        let peer = Peer::parse(&reply, address(1), 1, mtu).unwrap();
        let _connection = unconnected.connect(&peer, 13).unwrap();
        let mut entries = accepted.lock();
        while entries.by_number.len() == 2 {
            entries = accepted.changed.wait(entries).unwrap();
        }
        let left = entries.by_number.first_key_value().unwrap();
        assert_eq!(left.1.key.nic_path, "there:1@nic");
        // It gets another number with each answer.
        assert!(*left.0 > 2, "it has answered");
        drop(entries);
        accepted.stop();
        asking.join().unwrap();
    }

    /// A peer that connects again and again, as one that is killed, has one share.
    #[test]
    fn a_peer_is_told_what_it_may_send() {
        let accepted = Accepted::new(10, 13, Duration::from_secs(60));
        let config = RdmaConfig::new(&[address(4)]);
        let ours = LocalDevice::open(address(4), &config, Weak::new()).unwrap();
        let peer = |host: u8| HandShakeDesc {
            local_nic_path: format!("peer:{host}@nic"),
            local_gid: Some(Gid::from_address(address(host))),
            qp_num: (17..17 + MAX_QUEUE_PAIRS as u32).collect(),
            ..HandShakeDesc::default()
        };
        let share = |host| accepted.accept(&ours, &peer(host)).unwrap().receive_share.unwrap();
        let first = share(5);
        for _ in 0..20 {
            assert_eq!(share(5), first);
        }
        let goodbye = HandShakeDesc { disconnect: true, ..peer(5) };
        accepted.accept(&ours, &goodbye).unwrap();
        let shares: Vec<u64> = (6..16).map(share).collect();
        assert_eq!(shares[0], first);
        // Their sum is what there is at most, or each has the least.
        assert!(shares[9] < first || first == 128 << 10, "{shares:?}");
    }
}
