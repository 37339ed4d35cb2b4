//! Answers to numbered messages.

use std::sync::Arc;
use std::time::Instant;

use millstream_metadata::{FrameDecoder, MESSAGE_LIMIT, token_refusal};

use super::{Broken, Connection, SCRATCH, broke, closed, nonsense};
use crate::gpu::STAGED;
use crate::tcp::message::{Answer, Fault, Welcome};
use crate::tcp::peer::Peer;
use crate::{FailureReason, Opcode};

/// What a number means that a relay does not know.
const NO_WAY: &str = "the relay's way to the segment is not there any more: the relay or the segment's process was \
                      started again, or others needed the place";

/// What comes next.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Receiving {
    #[default]
    Welcome,
    Answer,
    /// So many faults, and what they belong to.
    Faults(u32, Answer),
    /// The data of the first message under way.
    Data,
}

impl Receiving {
    /// How many bytes are needed at once.
    const fn length(self) -> usize {
        match self {
            Self::Welcome => Welcome::LENGTH,
            Self::Answer => Answer::LENGTH,
            Self::Faults(..) => Fault::LENGTH,
            Self::Data => 0,
        }
    }
}

impl Connection {
    /// Receives what there is; when, if there was anything.
    pub(super) fn receive_numbered(&mut self, peer: &Arc<Peer>) -> Result<Option<Instant>, Broken> {
        let (mut has_come, mut is_drained) = (false, false);
        loop {
            self.read_stage(peer)?;
            // Before something is sent the end of the stream is looked for, too.
            if is_drained && !peer.flow().has_more() {
                break;
            }
            is_drained = false;
            let Some(stream) = &self.stream else { break };
            let received = match (self.receiving, self.under_way.front_mut()) {
                (Receiving::Data, Some(message)) => {
                    let room = if message.pieces.is_staged() { STAGED } else { SCRATCH };
                    self.scratch.resize(room.max(self.scratch.len()), 0);
                    self.line.receive_pieces(stream, &mut message.pieces, &mut self.scratch)
                }
                _ => {
                    let received = self.line.receive(stream, self.stage.room());
                    let count = *received.as_ref().unwrap_or(&0);
                    let has_room = self.stage.received(count);
                    // A stream gives all that it has: there is nothing more now, but its end perhaps.
                    is_drained = count > 0 && has_room && self.line.is_bare();
                    received
                }
            };
            match received {
                Ok(0) if self.may_end() => return Err(self.turned_away().unwrap_or(Broken::Done)),
                Ok(0) => return Err(self.turned_away().unwrap_or_else(closed)),
                Ok(_) => has_come = true,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(self.without_records().unwrap_or_else(|| broke(&error)));
                }
            }
        }
        let now = has_come.then(Instant::now);
        self.moved = now.or(self.moved);
        Ok(now)
    }

    /// What a port has said that asks for more than it was shown. It says so in no record: it has not read the hello.
    fn turned_away(&self) -> Option<Broken> {
        let mut decoder = FrameDecoder::new(MESSAGE_LIMIT);
        decoder.push(self.stage.unread()).ok()?;
        decoder.push(self.line.unread()).ok()?;
        let said = decoder.take().filter(|_| self.receiving == Receiving::Welcome)?;
        let reason = token_refusal(&said)?.to_string();
        Some(Broken::Failed(FailureReason::Connection(reason.into())))
    }

    /// The answer to the hello of a peer that knows of no records, which is no damaged one.
    fn without_records(&self) -> Option<Broken> {
        if self.receiving != Receiving::Welcome {
            return None;
        }
        let welcome = Welcome::parse(self.line.unread().first_chunk()?)?;
        let taken = nonsense("it answers without checksums, though it says that it knows of them");
        Some(welcomed(Some(welcome)).err().unwrap_or(taken))
    }

    /// Reads what has come.
    fn read_stage(&mut self, peer: &Arc<Peer>) -> Result<(), Broken> {
        loop {
            if self.receiving == Receiving::Data {
                let Some(message) = self.under_way.front_mut() else {
                    return Err(nonsense("data of nothing"));
                };
                let taken = message.pieces.take(self.stage.unread());
                self.stage.read(taken);
                if message.pieces.left() > 0 {
                    return Ok(());
                }
                self.receiving = Receiving::Answer;
            }
            let bytes = self.stage.unread();
            let length = self.receiving.length();
            if bytes.len() < length {
                return Ok(());
            }
            match self.receiving {
                Receiving::Welcome => {
                    let welcome = bytes.first_chunk().and_then(Welcome::parse);
                    // Nothing that was sent was done.
                    let has_no_way =
                        welcome == Some(Welcome::OtherIncarnation) && peer.place.relays;
                    self.turned_away = welcome == Some(Welcome::Full) || has_no_way;
                    if has_no_way {
                        return Err(Broken::Failed(FailureReason::Connection(NO_WAY.into())));
                    }
                    welcomed(welcome)?;
                    self.answered = true;
                    self.receiving = Receiving::Answer;
                }
                Receiving::Answer => {
                    let answer = bytes.first_chunk().and_then(Answer::parse);
                    let answer = answer.ok_or_else(|| nonsense("no answer begins so"))?;
                    let (Answer::Data { id, faults, .. } | Answer::Ended { id, faults }) = answer;
                    let is_sending = self.sending && self.under_way.len() == 1;
                    let front = self.under_way.front().filter(|message| message.id == id);
                    if front.is_none() || is_sending {
                        return Err(nonsense("it answers what was not asked"));
                    }
                    // Not before: what takes connections, and closes them, serves nobody.
                    if !std::mem::replace(&mut self.served, true) {
                        peer.connected();
                    }
                    self.receiving = Receiving::Faults(faults, answer);
                    self.stage.read(length);
                    self.read_faults(peer)?;
                    continue;
                }
                Receiving::Faults(left, answer) => {
                    let fault = bytes.first_chunk().and_then(Fault::parse);
                    let (index, fault) = fault.ok_or_else(|| nonsense("a fault is none"))?;
                    let Some(message) = self.under_way.front_mut() else {
                        return Err(nonsense("it answers what was not asked"));
                    };
                    if message.opcode.is_some() && !message.set_fault(index, fault) {
                        return Err(nonsense("a piece has a fault that is not there"));
                    }
                    if message.opcode.is_none() {
                        self.stage.read(length);
                        self.receiving = Receiving::Answer;
                        if let Some(message) = self.under_way.pop_front() {
                            peer.flow().not_fenced(message);
                        }
                        continue;
                    }
                    self.receiving = Receiving::Faults(left - 1, answer);
                    self.stage.read(length);
                    self.read_faults(peer)?;
                    continue;
                }
                Receiving::Data => {}
            }
            self.stage.read(length);
        }
    }

    /// Goes on where no faults are to come any more.
    fn read_faults(&mut self, peer: &Arc<Peer>) -> Result<(), Broken> {
        let Receiving::Faults(0, answer) = self.receiving else { return Ok(()) };
        let Some(message) = self.under_way.front_mut() else { return Ok(()) };
        match answer {
            Answer::Data { length, .. } => {
                if message.opcode != Some(Opcode::Read) {
                    return Err(nonsense("it sends data that was not asked for"));
                }
                if !message.expect_data() {
                    return Err(nonsense("it sends the data of a READ a second time"));
                }
                if message.pieces.left() != length {
                    return Err(nonsense("its data is not as long as was asked for"));
                }
                self.receiving = Receiving::Data;
            }
            Answer::Ended { .. } => {
                if message.opcode == Some(Opcode::Read) && !message.is_received() {
                    return Err(nonsense("it ends a READ without its data"));
                }
                self.receiving = Receiving::Answer;
                if let Some(message) = self.under_way.pop_front() {
                    self.under_way_bytes -= message.length;
                    peer.flow().done(message, true);
                }
            }
        }
        Ok(())
    }
}

fn welcomed(welcome: Option<Welcome>) -> Result<(), Broken> {
    let text = match welcome {
        Some(Welcome::Taken) => return Ok(()),
        Some(Welcome::OtherIncarnation) => return Err(Broken::Failed(FailureReason::Restarted)),
        Some(Welcome::OtherVersion) => {
            "it does not understand this version of the framing".to_owned()
        }
        Some(Welcome::Fenced) => "it has ended the connection".to_owned(),
        Some(Welcome::Full) => {
            "it relays over as many connections as it may (tcp.relay_connections): try again later"
                .to_owned()
        }
        None => "what answers there is no engine of this kind".to_owned(),
    };
    // A bit of it, or of the hello, may have changed on the way.
    Err(Broken::Ended(FailureReason::Connection(text.into())))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::Duration;

    use millstream_net::stream::{Readiness, wait_for_stream};

    use super::super::{Did, Phase};
    use super::*;
    use crate::batch::Batch;
    use crate::tcp::ended::AllEnded;
    use crate::tcp::testing::{Room, peer, push, tasks};

    /// A connection with a message under way for each of these, all sent, and what its peer says.
    struct Talk {
        peer: Arc<Peer>,
        connection: Connection,
        ids: Vec<u64>,
        _room: Room,
        _batches: Vec<Batch>,
    }

    impl Talk {
        fn new(asked: &[(Opcode, &[u64])]) -> Self {
            let (peer, room) = (peer(), Room::new(4096));
            let (mut connection, mut batches) = (Connection::default(), Vec::new());
            connection.receiving = Receiving::Answer;
            for (opcode, lengths) in asked {
                let (batch, handles) = tasks(*opcode, room.address(), lengths);
                let mut flow = peer.flow();
                push(&mut flow, &room, &handles);
                let message = flow.next_message().unwrap();
                connection.under_way_bytes += message.length;
                connection.under_way.push_back(message);
                batches.push(batch);
            }
            let ids = connection.under_way.iter().map(|message| message.id).collect();
            Self { peer, connection, ids, _room: room, _batches: batches }
        }

        fn hear(&mut self, bytes: &[u8]) -> Result<(), String> {
            self.connection.stage.receive(bytes);
            self.connection.read_stage(&self.peer).map_err(|broken| match broken {
                Broken::Failed(reason) | Broken::Ended(reason) => reason.to_string(),
                _ => "another end".to_owned(),
            })
        }
    }

    fn pair() -> (Arc<TcpStream>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Arc::new(near), listener.accept().unwrap().0)
    }

    /// Waits for bytes or the end of the stream.
    fn something_comes(stream: &TcpStream) {
        let long = Duration::from_secs(60);
        assert!(wait_for_stream(stream.as_fd(), Readiness::Readable, long).unwrap());
    }

    fn ended(id: u64) -> Vec<u8> {
        Answer::Ended { id, faults: 0 }.emit().to_vec()
    }

    fn data(id: u64, bytes: &[u8]) -> Vec<u8> {
        let length = bytes.len() as u64;
        [&Answer::Data { id, faults: 0, length }.emit()[..], bytes].concat()
    }

    #[test]
    fn answers_come_in_the_order_of_the_messages_and_once() {
        let asked: [(Opcode, &[u64]); 2] = [(Opcode::Write, &[10]), (Opcode::Write, &[20])];
        let mut talk = Talk::new(&asked);
        let (first, second) = (talk.ids[0], talk.ids[1]);
        let unasked = "it answers what was not asked";
        assert!(talk.hear(&ended(second)).unwrap_err().contains(unasked));
        let mut talk = Talk::new(&asked);
        // Byte by byte.
        for byte in ended(first) {
            assert_eq!(talk.connection.under_way.len(), 2);
            talk.hear(&[byte]).unwrap();
        }
        assert_eq!(talk.connection.under_way_bytes, 20);
        assert!(talk.hear(&ended(first)).unwrap_err().contains(unasked));
        let mut talk = Talk::new(&asked);
        // Before all of it was sent.
        talk.connection.sending = true;
        talk.hear(&ended(first)).unwrap();
        assert!(talk.hear(&ended(second)).unwrap_err().contains(unasked));
        let mut talk = Talk::new(&asked);
        talk.hear(&[ended(first), ended(second)].concat()).unwrap();
        assert!(talk.hear(&ended(second)).unwrap_err().contains(unasked), "nothing is under way");
    }

    #[test]
    fn data_is_what_was_asked_for_and_comes_once() {
        let asked: [(Opcode, &[u64]); 1] = [(Opcode::Read, &[4, 6])];
        for (what, said, reason) in [
            ("too short", data(0, b"123456789"), "not as long as was asked for"),
            ("too long", data(0, b"12345678901"), "not as long as was asked for"),
            ("none", ended(0), "it ends a READ without its data"),
            ("twice", [data(0, b"1234567890"), data(0, b"1234567890")].concat(), "a second time"),
            ("no answer", vec![9; 32], "no answer begins so"),
        ] {
            let mut talk = Talk::new(&asked);
            // Its number is not known before.
            let id = talk.ids[0].to_le_bytes();
            let mut said = said;
            let mut at = 0;
            while said.get(at).is_some_and(|kind| [1, 2].contains(kind)) {
                said[at + 8..at + 16].copy_from_slice(&id);
                at += 32 + usize::from(said[at + 16]);
            }
            let error = talk.hear(&said).unwrap_err();
            assert!(error.contains(reason), "{what}: {error}");
        }
        let mut talk = Talk::new(&[(Opcode::Write, &[4])]);
        let error = talk.hear(&data(talk.ids[0], b"1234")).unwrap_err();
        assert!(error.contains("data that was not asked for"), "{error}");
    }

    #[test]
    fn who_looks_for_an_answer_receives_it_or_does_nothing() {
        let mut talk = Talk::new(&[(Opcode::Write, &[4]), (Opcode::Read, &[5])]);
        let (near, mut far) = pair();
        let Talk { peer, connection, ids, .. } = &mut talk;
        connection.stream = Some(Arc::clone(&near));
        far.write_all(&ended(ids[0])).unwrap();
        something_comes(&near);
        let second = connection.under_way.pop_back().unwrap();
        assert_eq!(connection.look(peer), None, "it is not open yet");
        connection.phase = Phase::Open;
        connection.blocked = true;
        assert_eq!(connection.look(peer), None, "room is waited for, too");
        connection.blocked = false;
        connection.under_way.push_back(second);
        assert_eq!(connection.look(peer), None, "two messages are under way");
        let second = connection.under_way.pop_back().unwrap();
        assert!(connection.moved.is_none());
        assert_eq!(connection.look(peer), Some(Did::Idle));
        assert!(connection.under_way.is_empty() && connection.moved.is_some());
        assert_eq!(connection.look(peer), None, "nothing is under way");
        connection.under_way.push_back(second);
        assert_eq!(connection.look(peer), None, "nothing has come");
        assert!(!connection.has_changed() && connection.awaits_answer(peer));
        drop(far);
        something_comes(&near);
        // Its end has: the READ is asked for again, over another connection.
        assert_eq!(connection.look(peer), Some(Did::Again));
        assert!(connection.has_changed() && connection.under_way.is_empty());
    }

    #[test]
    fn a_connection_is_looked_at_before_something_is_sent_unless_it_was_heard_of_just_now() {
        // One that was made and not used for a while, too.
        let heard = [(false, Did::Again), (true, Did::Idle)];
        for (answered, (is_just_now, did)) in
            [true, false].iter().flat_map(|it| heard.map(|of| (*it, of)))
        {
            let (mut talk, room, (near, far)) = (Talk::new(&[]), Room::new(4), pair());
            let (_batch, handles) = tasks(Opcode::Write, room.address(), &[4]);
            let Talk { peer, connection, .. } = &mut talk;
            push(&mut peer.flow(), &room, &handles);
            (connection.phase, connection.answered) = (Phase::Open, answered);
            connection.stream = Some(Arc::clone(&near));
            drop(far);
            something_comes(&near);
            let (now, minute) = (Instant::now(), Duration::from_secs(60));
            connection.moved =
                if is_just_now { Some(now + minute) } else { now.checked_sub(minute) };
            assert_eq!(connection.work(peer, false, false), did);
            assert_eq!(connection.under_way.len(), usize::from(is_just_now));
            assert_eq!(peer.flow().has_more(), !is_just_now);
        }
    }

    /// An application that goes on submitting, to a peer that stands still.
    #[test]
    fn what_is_sent_behind_others_is_no_sign_of_life() {
        let (mut talk, room, (near, _far)) =
            (Talk::new(&[(Opcode::Write, &[4])]), Room::new(4), pair());
        let (_batch, handles) = tasks(Opcode::Write, room.address(), &[4]);
        let Talk { peer, connection, .. } = &mut talk;
        (connection.phase, connection.stream) = (Phase::Open, Some(near));
        let (now, patience) = (Instant::now(), peer.config().progress_timeout);
        connection.moved = now.checked_sub(patience / 2);
        push(&mut peer.flow(), &room, &handles);
        assert_eq!(connection.work(peer, false, false), Did::Idle);
        assert_eq!(connection.under_way.len(), 2);
        assert!(!connection.check(peer, now + patience / 4));
        assert!(connection.check(peer, now + patience * 3 / 4));
    }

    #[test]
    fn faults_are_of_pieces_that_are_there() {
        let mut talk = Talk::new(&[(Opcode::Write, &[4, 6])]);
        let said = |id, index| {
            let answer = Answer::Ended { id, faults: 1 }.emit();
            [&answer[..], &Fault::Gone.emit(index)].concat()
        };
        let id = talk.ids[0];
        let error = talk.hear(&said(id, 2)).unwrap_err();
        assert!(error.contains("a piece has a fault that is not there"), "{error}");
        let mut talk = Talk::new(&[(Opcode::Write, &[4, 6])]);
        talk.hear(&said(talk.ids[0], 1)).unwrap();
        assert!(talk.connection.under_way.is_empty());
        let mut all = AllEnded::default();
        talk.peer.flow().take_ended(&mut all);
        let states: Vec<_> = all.tasks.iter().map(|it| it.state).collect();
        assert_eq!(states, [crate::TransferState::Completed, crate::TransferState::Failed]);
    }
}
