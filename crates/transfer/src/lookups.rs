//! Where the processes of segments answer. A metadata server may take seconds to say so, or never do: threads wait for it on
//! which nothing else depends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millstream_metadata::{HostPort, Store, StoreError};

use crate::workers::Workers;

/// Questions to a metadata server at a time.
const MAX_QUESTIONS: usize = 4;

/// Who is told of an answer.
type Then = Box<dyn FnOnce(Result<HostPort, Arc<StoreError>>) + Send>;

/// Asks a store.
pub(crate) struct Lookups {
    store: Arc<dyn Store>,
    workers: Workers,
    asked: Arc<Asked>,
    stopped: AtomicBool,
}

/// Who waits for which answer: one question is asked for all of them.
#[derive(Default)]
struct Asked(Mutex<HashMap<String, Vec<Then>>>);

impl Asked {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Then>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, name: &str, found: Result<HostPort, StoreError>) {
        let found = found.map_err(Arc::new);
        let waiting = self.lock().remove(name);
        waiting.into_iter().flatten().for_each(|then| then(found.clone()));
    }
}

impl Lookups {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        let workers = Workers::new("lookup", MAX_QUESTIONS);
        Self { store, workers, asked: Arc::default(), stopped: AtomicBool::new(false) }
    }

    /// Tells `then` where the engine of this name answers: at once where that is known of this start of it, which keeps its
    /// address as long as it lives, and else on a thread that asks. `then` is dropped once this was stopped.
    pub(crate) fn address(
        &self,
        name: &str,
        incarnation: Option<u64>,
        then: impl FnOnce(Result<HostPort, Arc<StoreError>>) + Send + 'static,
    ) {
        if let Some(meta) = self.store.known_address(name, incarnation) {
            return then(Ok(meta.address));
        }
        if self.store.is_local() {
            return then(self.store.address(name).map(|meta| meta.address).map_err(Arc::new));
        }
        let mut asked = self.asked.lock();
        let waiting = asked.entry(name.to_owned()).or_default();
        waiting.push(Box::new(then));
        if waiting.len() > 1 {
            return;
        }
        drop(asked);
        let (store, all) = (Arc::clone(&self.store), Arc::clone(&self.asked));
        let asked = name.to_owned();
        let ask = move || all.answer(&asked, store.address(&asked).map(|meta| meta.address));
        if let Err(ask) = self.workers.run(Box::new(ask)) {
            match self.stopped.load(Ordering::Acquire) {
                true => {
                    let waiting = self.asked.lock().remove(name);
                    drop(waiting);
                }
                // The system has no thread.
                false => ask(),
            }
        }
    }

    /// Asks no more, and waits for what is being asked.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.workers.abandon();
        let waiting = std::mem::take(&mut *self.asked.lock());
        drop(waiting);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use millstream_metadata::{RpcMeta, SegmentDesc};

    use super::*;

    /// Says what it is asked, and answers when it is told to.
    struct Slow {
        asked: Mutex<Sender<String>>,
        answer: Mutex<Receiver<()>>,
    }

    impl Store for Slow {
        fn publish_segment(&self, _descriptor: &SegmentDesc) -> Result<(), StoreError> {
            Ok(())
        }

        fn withdraw_segment(&self, _name: &str) -> Result<(), StoreError> {
            Ok(())
        }

        fn segment(&self, _name: &str) -> Result<SegmentDesc, StoreError> {
            Ok(SegmentDesc::default())
        }

        fn publish_address(&self, _name: &str, _meta: &RpcMeta) -> Result<(), StoreError> {
            Ok(())
        }

        fn withdraw_address(&self, _name: &str) -> Result<(), StoreError> {
            Ok(())
        }

        fn address(&self, name: &str) -> Result<RpcMeta, StoreError> {
            self.asked.lock().unwrap().send(name.to_owned()).unwrap();
            let _ = self.answer.lock().unwrap().recv();
            Ok(RpcMeta { address: HostPort { host: name.to_owned(), port: 1 }, incarnation: None })
        }

        fn local_segment(&self) -> Option<Arc<[u8]>> {
            None
        }

        fn segment_limit(&self) -> usize {
            0
        }
    }

    #[test]
    fn one_question_is_asked_for_all_and_none_after_the_end() {
        let (ask, asked) = channel();
        let (answer, answered) = channel();
        let store = Slow { asked: Mutex::new(ask), answer: Mutex::new(answered) };
        let lookups = Lookups::new(Arc::new(store));
        let (tell, told) = channel();
        let look_up = |name: &str| {
            let tell = tell.clone();
            lookups.address(name, None, move |found| tell.send(found.unwrap().host).unwrap());
        };
        (0..3).for_each(|_| look_up("a"));
        assert_eq!(asked.recv().unwrap(), "a");
        answer.send(()).unwrap();
        assert_eq!([(); 3].map(|()| told.recv().unwrap()), ["a"; 3]);
        let names: Vec<_> = (0..10).map(|index| format!("b{index}")).collect();
        names.iter().for_each(|name| look_up(name));
        let begun: Vec<_> = (0..MAX_QUESTIONS).map(|_| asked.recv().unwrap()).collect();
        std::thread::scope(|scope| {
            let end = scope.spawn(|| lookups.stop());
            while !lookups.stopped.load(Ordering::Acquire) || lookups.workers.queued() > 0 {
                std::thread::yield_now();
            }
            begun.iter().for_each(|_| answer.send(()).unwrap());
            end.join().unwrap();
        });
        assert_eq!(told.try_iter().count(), MAX_QUESTIONS);
        assert_eq!(asked.try_iter().count(), 0, "the others are not asked any more");
        look_up("c");
        assert!(told.try_recv().is_err());
        // Who waits for it may be ended by that it is dropped.
        let waits = Arc::new(());
        let waiting = Arc::clone(&waits);
        lookups.address("d", None, move |_| drop(waiting));
        assert_eq!(Arc::strong_count(&waits), 1);
    }
}
