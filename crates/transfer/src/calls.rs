//! Calls to peers, for which no thread waits.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millstream_metadata::{
    CallError, CallErrorKind, Caller, ClientConfig, DEFAULT_FRAME_LIMIT, Frame, HostPort,
};

/// What is told of a call.
pub(crate) type Done = Box<dyn FnOnce(Result<Frame, CallError>) + Send>;

/// How long messages of applications that are under way hold up the end of an engine.
const PATIENCE: Duration = Duration::from_secs(1);

/// Calls to peers, until it is stopped.
pub(crate) struct Calls {
    timeout: Duration,
    /// How long `stop` waits for messages of applications.
    patience: Duration,
    caller: Mutex<Option<Arc<Caller>>>,
    messages: Arc<Messages>,
}

/// Messages of applications that were not answered yet.
#[derive(Default)]
struct Messages {
    count: Mutex<usize>,
    none: Condvar,
}

/// A message of an application, until it was answered: [`Calls::stop`] waits for it.
pub(crate) struct Message(Arc<Messages>);

impl Drop for Message {
    fn drop(&mut self) {
        let mut count = self.0.count();
        *count -= 1;
        if *count == 0 {
            self.0.none.notify_all();
        }
    }
}

impl Messages {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Calls {
    pub(crate) fn new(config: ClientConfig) -> Self {
        // What is answered is short, unlike descriptors.
        let frame_limit = DEFAULT_FRAME_LIMIT.min(config.frame_limit);
        let caller = Some(Arc::new(Caller::new(ClientConfig { frame_limit, ..config })));
        let (timeout, messages) = (config.call_timeout, Arc::default());
        Self { timeout, patience: PATIENCE, caller: Mutex::new(caller), messages }
    }

    /// The longest that a call takes by the configuration.
    pub(crate) const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Asks a peer. `done` is told by a thread that all calls share, so it is short; after `stop`, on this
    /// thread.
    pub(crate) fn call(&self, address: &HostPort, frame: Frame, timeout: Duration, done: Done) {
        let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match caller {
            Some(caller) => caller.call(address, frame, timeout, done),
            None => done(Err(CallError { peer: address.clone(), kind: CallErrorKind::Ended })),
        }
    }

    /// Counts a message of an application that is to be delivered.
    pub(crate) fn message(&self) -> Message {
        *self.messages.count() += 1;
        Message(Arc::clone(&self.messages))
    }

    /// As [`Calls::call`], with such a message.
    pub(crate) fn deliver(&self, message: Message, address: &HostPort, frame: Frame, done: Done) {
        let told = move |result| {
            done(result);
            drop(message);
        };
        self.call(address, frame, self.timeout, Box::new(told));
    }

    /// Ends all calls. Takes no more. What an application has said when its transfers were over arrives before, where
    /// peers answer soon.
    pub(crate) fn stop(&self) {
        let count = self.messages.count();
        let none = &self.messages.none;
        let waited = none.wait_timeout_while(count, self.patience, |count| *count > 0);
        drop(waited);
        let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(caller);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};
    use std::sync::mpsc;

    use millstream_metadata::{FrameType, Handler, Server, ServerConfig};

    use super::*;

    struct Echo;

    impl Handler for Echo {
        fn handle(&self, _: SocketAddr, request: Frame) -> Option<Frame> {
            Some(request)
        }
    }

    /// How a call fared whose caller ends at once.
    fn fared(begin: impl FnOnce(&Calls, &HostPort, Frame, Done)) -> bool {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let own = listener.local_addr().unwrap();
        let _server = Server::serve(listener, ServerConfig::default(), Arc::new(Echo)).unwrap();
        // As long as a busy machine may need for an answer.
        let long = Duration::from_secs(60);
        let config =
            ClientConfig { connect_timeout: long, call_timeout: long, ..ClientConfig::default() };
        let calls = Calls { patience: long, ..Calls::new(config) };
        let (tell, told) = mpsc::channel();
        let done =
            Box::new(move |result: Result<Frame, CallError>| tell.send(result.is_ok()).unwrap());
        let address = HostPort::from_address(own.ip(), own.port());
        begin(&calls, &address, Frame::new(FrameType::Probe, b"{}".to_vec()), done);
        calls.stop();
        told.recv().unwrap()
    }

    #[test]
    fn messages_arrive_before_the_end_and_other_calls_do_not_hold_it_up() {
        let call = |calls: &Calls, address: &HostPort, frame, done| {
            calls.call(address, frame, calls.timeout(), done);
        };
        // One may be answered as fast as that.
        assert!((0..20).any(|_| !fared(call)));
        let deliver = |calls: &Calls, address: &HostPort, frame, done| {
            calls.deliver(calls.message(), address, frame, done);
        };
        assert!((0..20).all(|_| fared(deliver)));
    }

    #[test]
    fn a_message_to_who_does_not_answer_holds_the_end_up_for_a_bounded_time() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = silent.local_addr().unwrap();
        let calls = Calls::new(ClientConfig::default());
        let address = HostPort::from_address(own.ip(), own.port());
        let (tell, told) = mpsc::channel();
        let done =
            Box::new(move |result: Result<Frame, CallError>| tell.send(result.is_ok()).unwrap());
        calls.deliver(
            calls.message(),
            &address,
            Frame::new(FrameType::Probe, b"{}".to_vec()),
            done,
        );
        calls.stop();
        assert!(!told.recv().unwrap());
    }
}
