//! What may be in flight of an engine and of each class of its policy file: over a limit a submission is refused
//! as a whole, and nobody waits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{AdmissionLimits, PolicyFile};

/// What is in flight of the engine or of a class.
#[derive(Debug, Default)]
struct Usage {
    limits: AdmissionLimits,
    bytes: u64,
    requests: u64,
}

/// What is in flight, of what has limits.
#[derive(Debug)]
pub(crate) struct Admission {
    /// Of the engine, and then of each class.
    usages: Mutex<Vec<Usage>>,
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
        Self { usages: Mutex::new(usages), engine_is_limited: file.limits.is_limited() }
    }

    fn usages(&self) -> MutexGuard<'_, Vec<Usage>> {
        self.usages.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut usages = self.usages();
        let places = || [Some(0), class.map(|class| class + 1)].into_iter().flatten();
        let (mut bytes, mut requests) = (0_u64, 0);
        let mut first = None;
        for (index, length) in lengths.enumerate() {
            (bytes, requests) = (bytes.saturating_add(length), requests + 1);
            for place in places() {
                let Usage { limits, bytes: known_bytes, requests: known } = &usages[place];
                for (of_bytes, limit, in_flight, more) in [
                    (true, limits.bytes, *known_bytes, bytes),
                    (false, limits.requests, *known, requests),
                ] {
                    if let Some(limit) = limit.filter(|&it| in_flight.saturating_add(more) > it) {
                        let (of_class, alone) = (place > 0, more > limit);
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
        for place in places() {
            let usage = &mut usages[place];
            usage.bytes = usage.bytes.saturating_add(bytes);
            usage.requests += requests;
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
        let usages = self.usages();
        (usages[class + 1].bytes, usages[class + 1].requests)
    }
}

impl Admitted {
    /// Its task has ended.
    pub(crate) fn release(&self) {
        let mut usages = self.admission.usages();
        for place in [Some(0), self.class.map(|class| class + 1)].into_iter().flatten() {
            let usage = &mut usages[place];
            usage.bytes = usage.bytes.saturating_sub(self.bytes);
            usage.requests = usage.requests.saturating_sub(1);
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
        let file = PolicyFile { limits: limits(engine), classes: vec![class] };
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
    fn what_has_no_limits_is_not_counted() {
        let unlimited = admission([None, None], [None, None]);
        assert!(!unlimited.concerns(None));
        let limited = admission([Some(1), None], [None, None]);
        assert!(limited.concerns(None) && limited.concerns(Some(0)));
    }
}
