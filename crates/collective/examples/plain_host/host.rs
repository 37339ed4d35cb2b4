//! A host of an AllReduce that sends no descriptors: all that it knows is the control protocol, and SEND and receive of
//! verbs.
//!
//! Its k-th SEND is the k-th segment of 32-bit integers, and is answered by a SEND of the sum of all hosts' k-th. So a
//! program that has its own collectives, or none, can use a switch.

#[path = "control.rs"]
mod control;

use std::fmt::Display;
use std::time::{Duration, Instant};

use millstream_inc::CommunicatorOptions;
use millstream_inc::protocol::{FallbackOffer, FromController, Hello, ToController};
use millstream_verbs::{
    Access, Completion, CompletionOperation, CompletionQueue, CompletionStatus, Device,
    MemoryRegion, Piece, Psn, QueuePair, QueuePairAttributes, QueuePairCapabilities,
    QueuePairState, ReceiveRequest, SendOperation, SendRequest,
};

use control::Control;

/// For the group to be complete, and for the answers to a vector.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often who waits for answers looks whether the group is over.
const GLANCE: Duration = Duration::from_millis(100);
/// Of queue pairs, 4.096 us * 2^18 = 1.1 s: a machine of an emulated processor may stand still for half a second.
const TIMEOUT: u8 = 18;
/// The first packet sequence number. A real program draws it at random.
const FIRST_PSN: Psn = Psn::new(0x1000);

/// A rank that is connected to its switch.
pub(crate) struct PlainHost {
    control: Control,
    pair: QueuePair,
    completions: CompletionQueue,
    /// Of `memory`.
    region: MemoryRegion,
    /// Segments to send, and behind them as many for answers.
    memory: Box<[u8]>,
    segment: usize,
    window: usize,
    calls: u64,
}

impl PlainHost {
    /// Joins `group` and waits for the others.
    pub(crate) fn join(
        controller: &str,
        group: &str,
        world: u32,
        rank: u32,
        device: &Device,
    ) -> Result<Self, String> {
        let control = Control::connect(controller)?;
        control.say(&ToController::Join(Hello {
            group: group.to_owned(),
            world,
            rank,
            address: device.address(),
            timeout_ms: PATIENCE.as_millis() as u64,
            more_addresses: Vec::new(),
            same_machine: None,
            options: CommunicatorOptions { plain: true, reproducible: false },
            fallback: FallbackOffer::Off,
            meeting: None,
            avoid: Vec::new(),
        }))?;
        let (switch, segment, window) = match control.hear(PATIENCE)? {
            FromController::GroupReady { switch_address, segment_bytes, window, .. } => {
                (switch_address, segment_bytes as usize, window as usize)
            }
            other => return Err(format!("not that the group is ready: {other:?}")),
        };

        let domain = device.allocate_protection_domain();
        let mut memory = vec![0; 2 * segment * window].into_boxed_slice();
        let (start, access) = (memory.as_mut_ptr(), Access::LOCAL_WRITE);
        // SAFETY: `PlainHost` drops the region before the memory, and looks at a part of it only while no request
        // for that is posted.
        let region = unsafe { domain.register_memory(start, memory.len(), access) };
        let region = region.map_err(text)?;
        let completions = device.create_completion_queue(2 * window).map_err(text)?;
        let capabilities = QueuePairCapabilities::new(window, window);
        let pair =
            domain.create_queue_pair(&completions, &completions, capabilities).map_err(text)?;

        let path_mtu = device.path_mtu(switch).map_err(text)?;
        let (qpn, psn) = (pair.number(), FIRST_PSN);
        let connect =
            ToController::Connect { qpn, psn, path_mtu, receive_share: None, more: Vec::new() };
        control.say(&connect)?;
        let plan = match control.hear(PATIENCE)? {
            FromController::Plan(plan) => plan,
            other => return Err(format!("not the plan: {other:?}")),
        };
        let none = QueuePairAttributes::default();
        let steps = [
            QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                access: Some(Access::LOCAL_WRITE),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(plan.address),
                path_mtu: Some(plan.path_mtu),
                destination_qpn: Some(plan.qpn),
                receive_psn: Some(plan.psn),
                responder_resources: Some(0),
                minimum_rnr_timer: Some(1),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(psn),
                timeout: Some(TIMEOUT),
                retry_count: Some(6),
                rnr_retry: Some(7),
                initiator_depth: Some(0),
                ..none
            },
        ];
        steps.iter().try_for_each(|step| pair.modify(step)).map_err(text)?;
        Ok(Self { control, pair, completions, region, memory, segment, window, calls: 0 })
    }

    /// Puts the sum of all hosts' vectors in place of this one.
    pub(crate) fn all_reduce(&mut self, vector: &mut [i32]) -> Result<(), String> {
        let start = Instant::now();
        let elements = self.segment / size_of::<i32>();
        let messages = vector.len().div_ceil(elements);
        for index in 0..messages.min(self.window) {
            self.post_receive(index)?;
        }
        // What was posted, what has left, and what was answered.
        let (mut posted, mut sent, mut answered) = (0, 0, 0);
        let mut found: Vec<Completion> = Vec::new();
        while sent < messages || answered < messages {
            while posted < messages && posted < sent.min(answered) + self.window {
                self.post_send(posted, chunk(vector, elements, posted))?;
                posted += 1;
            }
            if start.elapsed() > PATIENCE {
                let of = vector.len();
                return Err(format!("{answered} of {messages} messages ({of} elements) answered"));
            }
            // Who waits for an answer only may not notice that the switch has closed its queue pair.
            self.control.trouble()?;
            self.completions.wait(GLANCE);
            found.clear();
            self.completions.poll(&mut found, 2 * self.window);
            for completion in &found {
                if completion.status != CompletionStatus::Success {
                    return Err(self.why(completion));
                }
                match completion.operation {
                    CompletionOperation::Receive => {
                        self.take(answered, completion, chunk(vector, elements, answered))?;
                        answered += 1;
                        if answered + self.window <= messages {
                            self.post_receive(answered + self.window - 1)?;
                        }
                    }
                    _ => sent += 1,
                }
            }
        }
        self.calls += 1;
        Ok(())
    }

    /// Says that this host is done, and waits until nobody needs its queue pair.
    pub(crate) fn leave(self) -> Result<(), String> {
        self.control.say(&ToController::Leave { collectives: self.calls })?;
        loop {
            match self.control.hear(PATIENCE)? {
                FromController::Closed => return Ok(()),
                FromController::Left { .. } => {}
                other => return Err(format!("not that all have left: {other:?}")),
            }
        }
    }

    /// Where a message lies, or its answer.
    fn place(&self, message: usize, is_answer: bool) -> std::ops::Range<usize> {
        let slot = message % self.window + usize::from(is_answer) * self.window;
        slot * self.segment..(slot + 1) * self.segment
    }

    fn piece(&self, message: usize, is_answer: bool, length: usize) -> [Piece; 1] {
        let address = self.region.address() + self.place(message, is_answer).start as u64;
        [Piece { key: self.region.key(), address, length: length as u32 }]
    }

    fn post_receive(&self, message: usize) -> Result<(), String> {
        let pieces = self.piece(message, true, self.segment);
        let request = ReceiveRequest { id: message as u64, pieces };
        self.pair.post_receive(&[request]).map_err(|(_, error)| text(error))
    }

    fn post_send(&mut self, message: usize, elements: &[i32]) -> Result<(), String> {
        let place = self.place(message, false);
        for (bytes, element) in self.memory[place].chunks_exact_mut(4).zip(elements) {
            bytes.copy_from_slice(&element.to_le_bytes());
        }
        let pieces = self.piece(message, false, size_of_val(elements));
        let operation = SendOperation::Send { immediate: None };
        let request = SendRequest::new(message as u64, operation, pieces);
        self.pair.post_send(&[request]).map_err(|(_, error)| text(error))
    }

    /// Takes an answer into the vector.
    fn take(
        &self,
        message: usize,
        completion: &Completion,
        elements: &mut [i32],
    ) -> Result<(), String> {
        let (found, wanted) = (completion.length as usize, size_of_val(elements));
        if completion.id != message as u64 || found != wanted {
            return Err(format!("answer {message} has {found} bytes, and not {wanted}"));
        }
        let place = self.place(message, true);
        for (element, bytes) in elements.iter_mut().zip(self.memory[place].chunks_exact(4)) {
            *element = i32::from_le_bytes(bytes.try_into().expect("chunks of four"));
        }
        Ok(())
    }

    /// Why a request failed: an abort closes the connection to the switch, and the controller tells of it.
    fn why(&self, completion: &Completion) -> String {
        loop {
            match self.control.hear(Duration::from_secs(10)) {
                Ok(FromController::Left { .. }) => {}
                Err(reason) => return reason,
                Ok(_) => {
                    return format!("{:?} failed: {}", completion.operation, completion.status);
                }
            }
        }
    }
}

/// The part of a vector that a message has.
fn chunk(vector: &mut [i32], elements: usize, message: usize) -> &mut [i32] {
    let end = vector.len().min((message + 1) * elements);
    &mut vector[message * elements..end]
}

fn text(error: impl Display) -> String {
    error.to_string()
}
