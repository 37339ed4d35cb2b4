//! What may be in flight of an engine and of each class of its policy file: over a limit a submission is refused
//! as a whole, and nobody waits. Who submits takes a lock; a task that ends subtracts, and takes none.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{AdmissionLimits, PolicyFile};

/// What is in flight of the engine or of a class. Sums wrap, as those of bytes without a limit may.
#[derive(Debug, Default)]
struct Usage {
    limits: AdmissionLimits,
    bytes: AtomicU64,
    requests: AtomicU64,
}

/// What is in flight, of what has limits.
#[derive(Debug)]
pub(crate) struct Admission {
    /// Of the engine, and then of each class.
    usages: Box<[Usage]>,
    /// Held by who adds to them: what is in flight becomes only less meanwhile.
    adding: Mutex<()>,
    engine_is_limited: bool,
}

/// What a task takes of its limits, until it has ended.
#[derive(Debug)]
pub(crate) struct Admitted {
    admission: Arc<Admission>,
    class: Option<usize>,
    bytes: u64,
}

/// A limit that a request would exceed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Excess {
    /// Which of the requests, from 0, with those before it.
    pub(crate) index: usize,
    /// The limit is the class's, and not the engine's.
    pub(crate) of_class: bool,
    /// It is of bytes, and not of requests.
    pub(crate) of_bytes: bool,
    /// These requests are more than the limit if nothing else is in flight, too.
    pub(crate) alone: bool,
    pub(crate) limit: u64,
    /// What is in flight before these requests.
    pub(crate) in_flight: u64,
}

impl Admission {
    pub(crate) fn new(file: &PolicyFile) -> Self {
        let limits = [file.limits].into_iter().chain(file.classes.iter().map(|class| class.limits));
        let usages = limits.map(|limits| Usage { limits, ..Usage::default() }).collect();
        let adding = Mutex::default();
        Self { usages, adding, engine_is_limited: file.limits.is_limited() }
    }

    /// What the requests of a class are part of.
    fn usages(&self, class: Option<usize>) -> impl Iterator<Item = (bool, &Usage)> {
        let places = [Some(0), class.map(|class| class + 1)].into_iter().flatten();
        places.map(|place| (place > 0, &self.usages[place]))
    }

    /// Whether requests of a class have to be admitted.
    pub(crate) fn concerns(&self, class: Option<usize>) -> bool {
        self.engine_is_limited || class.is_some()
    }

    /// Admits requests of these lengths, all or none.
    pub(crate) fn admit(
        &self,
        class: Option<usize>,
        lengths: impl Iterator<Item = u64>,
    ) -> Result<(), Excess> {
        let _adding = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut bytes, mut requests) = (0_u64, 0);
        let mut first = None;
        for (index, length) in lengths.enumerate() {
            (bytes, requests) = (bytes.saturating_add(length), requests + 1_u64);
            for (of_class, usage) in self.usages(class) {
                for (of_bytes, limit, in_flight, more) in [
                    (true, usage.limits.bytes, &usage.bytes, bytes),
                    (false, usage.limits.requests, &usage.requests, requests),
                ] {
                    let in_flight = in_flight.load(Ordering::Acquire);
                    if let Some(limit) = limit.filter(|&it| in_flight.saturating_add(more) > it) {
                        let alone = more > limit;
                        let excess = Excess { index, of_class, of_bytes, alone, limit, in_flight };
                        // What never has room is not to be submitted again, whatever else is in flight now.
                        if alone {
                            return Err(excess);
                        }
                        first.get_or_insert(excess);
                    }
                }
            }
        }
        if let Some(excess) = first {
            return Err(excess);
        }
        for (_, usage) in self.usages(class) {
            usage.bytes.fetch_add(bytes, Ordering::Relaxed);
            usage.requests.fetch_add(requests, Ordering::Relaxed);
        }
        Ok(())
    }

    /// For a task of so many bytes that was admitted.
    pub(crate) fn hold(self: &Arc<Self>, class: Option<usize>, bytes: u64) -> Admitted {
        Admitted { admission: Arc::clone(self), class, bytes }
    }

    /// Bytes and requests in flight of a class.
    #[cfg(test)]
    fn in_flight(&self, class: usize) -> (u64, u64) {
        let Usage { bytes, requests, .. } = &self.usages[class + 1];
        (bytes.load(Ordering::Relaxed), requests.load(Ordering::Relaxed))
    }
}

impl Admitted {
    /// Its task has ended.
    pub(crate) fn release(&self) {
        for (_, usage) in self.admission.usages(self.class) {
            // What the task did was before what is admitted in its place.
            usage.bytes.fetch_sub(self.bytes, Ordering::Release);
            usage.requests.fetch_sub(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PolicyClass;

    fn admission(engine: [Option<u64>; 2], class: [Option<u64>; 2]) -> Arc<Admission> {
        let limits = |[bytes, requests]: [Option<u64>; 2]| AdmissionLimits { bytes, requests };
        let class = PolicyClass {
            name: "a".to_owned(),
            priority: crate::PriorityLevel::Normal,
            deadline: None,
            transports: Vec::new(),
            limits: limits(class),
        };
        let file = PolicyFile { limits: limits(engine), classes: vec![class], rules: vec![] };
        Arc::new(Admission::new(&file))
    }

    #[test]
    fn all_or_none_are_admitted_up_to_the_limit() {
        let admission = admission([None, Some(4)], [Some(100), None]);
        let admit = |lengths: &[u64]| admission.admit(Some(0), lengths.iter().copied());
        admit(&[60, 40]).unwrap();
        let excess = admit(&[0, 1]).unwrap_err();
        let (of_class, of_bytes, alone) = (true, true, false);
        let expected = Excess { index: 1, of_class, of_bytes, alone, limit: 100, in_flight: 100 };
        assert_eq!(excess, expected);
        assert_eq!(admission.in_flight(0), (100, 2), "nothing of what was refused");
        // Others have the engine's limit.
        let excess = admission.admit(None, [1, 1, 1].into_iter()).unwrap_err();
        let (of_class, of_bytes) = (false, false);
        assert_eq!(excess, Excess { index: 2, of_class, of_bytes, alone, limit: 4, in_flight: 2 });
        admission.hold(Some(0), 60).release();
        assert_eq!(admission.in_flight(0), (40, 1));
        admit(&[60]).unwrap();
        let excess = admit(&[u64::MAX, u64::MAX]).unwrap_err();
        assert_eq!((excess.index, excess.in_flight, excess.alone), (0, 100, true));
        // That the first has no room now is not what keeps these out for ever.
        let excess = admit(&[1, 100]).unwrap_err();
        assert_eq!((excess.index, excess.alone), (1, true));
        let excess = admit(&[1, 99]).unwrap_err();
        assert_eq!((excess.index, excess.alone), (0, false));
    }

    #[test]
    fn what_ends_meanwhile_lets_no_more_in_than_the_limit() {
        let admission = admission([None, Some(2)], [Some(30), None]);
        let in_flight = AtomicU64::new(0);
        let work = || {
            for _ in 0..5000 {
                if admission.admit(Some(0), [10].into_iter()).is_ok() {
                    assert!(in_flight.fetch_add(1, Ordering::SeqCst) < 2);
                    in_flight.fetch_sub(1, Ordering::SeqCst);
                    admission.hold(Some(0), 10).release();
                }
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
        assert_eq!(admission.in_flight(0), (0, 0));
    }

    #[test]
    fn what_has_no_limits_is_not_counted() {
        let unlimited = admission([None, None], [None, None]);
        assert!(!unlimited.concerns(None));
        let limited = admission([Some(1), None], [None, None]);
        assert!(limited.concerns(None) && limited.concerns(Some(0)));
    }
}
