//! Questions to the process of a segment, at its control port: at the address of its name first, and where that does not
//! answer soon, at all others that its descriptor names. Whoever is cut off from one of its NICs reaches it by another.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use millstream_metadata::{
    CallError, CallErrorKind, Frame, FrameType, HandShakeDesc, HostPort, SegmentDesc,
};

use crate::calls::Calls;
use crate::engine::Inner;
use crate::segment::OpenSegment;

/// How long the process of a peer may take to say that it is there, or that a connection has ended.
const PATIENCE: Duration = Duration::from_secs(2);

/// After so long it is asked at its other addresses, too, and once more at that of its name. Peers answer in milliseconds.
const SILENT: Duration = Duration::from_millis(200);

/// At so many other addresses it is asked at most, all at once.
const MAX_OTHERS: usize = 16;

impl Inner {
    /// Asks the process of a segment at its control port to end a connection for data of the transport `tcp`, and tells
    /// `done` whether it has confirmed that nothing of it is done any more.
    pub(crate) fn fence_stream(
        &self,
        segment: &Arc<OpenSegment>,
        incarnation: u64,
        connection: u128,
        done: impl FnOnce(bool) + Send + 'static,
    ) {
        let request = HandShakeDesc {
            incarnation: Some(self.incarnation()),
            peer_incarnation: Some(incarnation),
            stream: Some(format!("{connection:032x}")),
            ..HandShakeDesc::default()
        };
        let frame = Frame::new(FrameType::Connection, request.to_json());
        let parse = |reply: &Frame| HandShakeDesc::from_json(&reply.body).ok();
        let who = move |reply: &Frame| parse(reply)?.incarnation;
        self.ask_process(segment, frame, who, move |reply| {
            let reply = reply.and_then(|reply| parse(&reply));
            done(reply.is_some_and(|it| it.stream_fenced && it.incarnation == Some(incarnation)));
        });
    }

    /// Asks the process of a segment something. `done` is told what it has answered, if it has, by a thread that others
    /// share. `who` says of which start of a process an answer is: at an address other than that of the name somebody
    /// else may listen. Does not wait.
    pub(crate) fn ask_process(
        &self,
        segment: &Arc<OpenSegment>,
        frame: Frame,
        who: impl Fn(&Frame) -> Option<u64> + Send + Sync + 'static,
        done: impl FnOnce(Option<Frame>) + Send + 'static,
    ) {
        let (calls, descriptor) = (Arc::clone(&self.calls), segment.descriptor());
        let incarnation = descriptor.incarnation;
        self.lookups.address(&segment.name, incarnation, move |found| {
            let Ok(name) = found else { return done(None) };
            let others = others(&descriptor, &name);
            let is_it = move |reply: &Frame| incarnation.is_some() && who(reply) == incarnation;
            let patience = PATIENCE.min(calls.timeout());
            ask(&calls, Question { name, others, frame }, (SILENT, patience), is_it, done);
        });
    }
}

/// What is asked, and where.
struct Question {
    name: HostPort,
    others: Vec<HostPort>,
    frame: Frame,
}

/// The addresses at which a process says that it answers, beside that of its name.
fn others(descriptor: &SegmentDesc, name: &HostPort) -> Vec<HostPort> {
    let own = name.host.parse::<IpAddr>().ok();
    let all = descriptor.control_addresses.iter().filter(|address| Some(address.ip()) != own);
    let all = all.map(|address| HostPort::from_address(address.ip(), address.port()));
    all.take(MAX_OTHERS).collect()
}

/// Asks for so long in all, and after this time without an answer everywhere.
fn ask(
    calls: &Arc<Calls>,
    question: Question,
    (silent, patience): (Duration, Duration),
    is_it: impl Fn(&Frame) -> bool + Send + Sync + 'static,
    done: impl FnOnce(Option<Frame>) + Send + 'static,
) {
    let first = if question.others.is_empty() { patience } else { silent.min(patience) };
    let (name, frame) = (question.name.clone(), question.frame.clone());
    let more = Arc::downgrade(calls);
    let told = move |reply: Result<Frame, CallError>| match reply {
        Ok(reply) => done(Some(reply)),
        Err(error) if is_gone(&error) => done(None),
        Err(_) => match more.upgrade() {
            Some(calls) if !question.others.is_empty() => {
                ask_everywhere(&calls, question, patience - first, is_it, done);
            }
            _ => done(None),
        },
    };
    calls.call(&name, frame, first, Box::new(told));
}

/// Whether nobody listens where the name leads, or the engine here ends.
const fn is_gone(error: &CallError) -> bool {
    matches!(error.kind, CallErrorKind::Refused { .. } | CallErrorKind::Ended)
}

/// The first answer of the process counts, or the last failure.
fn ask_everywhere(
    calls: &Calls,
    question: Question,
    patience: Duration,
    is_it: impl Fn(&Frame) -> bool + Send + Sync + 'static,
    done: impl FnOnce(Option<Frame>) + Send + 'static,
) {
    let Question { name, others, frame } = question;
    let is_it = Arc::new(is_it);
    let asked = Arc::new((Mutex::new(Some(done)), AtomicUsize::new(1 + others.len())));
    for (place, address) in [name].iter().chain(&others).enumerate() {
        let (is_it, asked) = (Arc::clone(&is_it), Arc::clone(&asked));
        let told = move |reply: Result<Frame, CallError>| {
            let (done, left) = &*asked;
            let is_over = place == 0 && reply.as_ref().is_err_and(is_gone);
            let reply = reply.ok().filter(|reply| place == 0 || is_it(reply));
            let is_last = left.fetch_sub(1, Ordering::AcqRel) == 1;
            if is_over || is_last || reply.is_some() {
                let done = done.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(done) = done {
                    done(reply);
                }
            }
        };
        calls.call(address, frame.clone(), patience, Box::new(told));
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};
    use std::sync::mpsc;

    use millstream_metadata::{ClientConfig, Handler, Server, ServerConfig};
    use socket2::{Domain, Socket, Type};

    use super::*;

    /// Longer than anything here takes, unless it hangs.
    const LONG: Duration = Duration::from_secs(60);

    /// Answers with what it is.
    struct Named(&'static str);

    impl Handler for Named {
        fn handle(&self, _: SocketAddr, request: Frame) -> Option<Frame> {
            Some(Frame::new(request.frame_type, self.0))
        }
    }

    fn listener() -> (TcpListener, HostPort) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let own = listener.local_addr().unwrap();
        (listener, HostPort::from_address(own.ip(), own.port()))
    }

    /// An address that somebody has, and where nobody listens.
    fn nobody() -> (Socket, HostPort) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        let own = socket.local_addr().unwrap().as_socket().unwrap();
        (socket, HostPort::from_address(own.ip(), own.port()))
    }

    fn server(what: &'static str) -> (Server, HostPort) {
        let (listener, address) = listener();
        let handler = Arc::new(Named(what));
        (Server::serve(listener, ServerConfig::default(), handler).unwrap(), address)
    }

    /// What is answered at one of these places, of which the first is that of the name.
    fn answer(places: &[&HostPort], times: (Duration, Duration)) -> Option<String> {
        let calls = Arc::new(Calls::new(ClientConfig::default()));
        let others = places[1..].iter().map(|&address| address.clone()).collect();
        let frame = Frame::new(FrameType::Probe, b"{}".to_vec());
        let question = Question { name: places[0].clone(), others, frame };
        let (tell, told) = mpsc::channel();
        let done = move |reply: Option<Frame>| tell.send(reply).unwrap();
        ask(&calls, question, times, |reply| reply.body == b"it", done);
        let reply = told.recv_timeout(LONG).unwrap();
        calls.stop();
        assert!(told.recv().is_err(), "it is told once");
        reply.map(|reply| String::from_utf8(reply.body).unwrap())
    }

    #[test]
    fn who_is_silent_at_its_name_is_asked_at_its_other_addresses() {
        let (_silent, silent) = listener();
        let (_it, it) = server("it");
        let (_stranger, stranger) = server("stranger");
        let (_held, nobody) = nobody();
        let soon = |patience| (Duration::from_millis(20), patience);
        let found = |places: &[&HostPort]| answer(places, soon(LONG));
        assert_eq!(found(&[&silent, &it]).as_deref(), Some("it"));
        assert_eq!(found(&[&silent, &stranger, &nobody, &it]).as_deref(), Some("it"));
        let none = |places: &[&HostPort]| answer(places, soon(Duration::from_millis(300)));
        assert_eq!(none(&[&silent, &stranger]), None, "a stranger says nothing of it");
        assert_eq!(none(&[&silent]), None);
    }

    #[test]
    fn what_is_said_where_the_name_leads_counts() {
        let (_it, it) = server("it");
        let (_other, other) = server("another start of it");
        let found = |places: &[&HostPort]| answer(places, (LONG, LONG));
        assert_eq!(found(&[&other, &it]).as_deref(), Some("another start of it"));
        let (_held, nobody) = nobody();
        assert_eq!(found(&[&nobody, &it]), None, "its process is gone");
    }
}
