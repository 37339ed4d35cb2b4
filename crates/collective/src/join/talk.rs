//! The conversation with a controller until its plan is there.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use millstream_inc::protocol::{FromController, HostsTrees, ToController, shortened};
use millstream_inc::{MAX_TREES, SwitchEvent};
use millstream_net::tls;
use millstream_verbs::Device;

use super::trees::Trees;
use super::{JoinConfig, Waiting};
use crate::JoinError;
use crate::control::{ReceiveError, Receiver, Sender};
use crate::hosted::HostedSwitch;

/// The controller says every second what a rank waits for; who hears nothing for so long waits for
/// the controller.
pub(super) const SILENCE: Duration = Duration::from_secs(2);

/// Where there are other controllers to ask: how long one may take to say something.
pub(super) const ANSWER: Duration = Duration::from_secs(2);

/// The conversation until the plan is there.
pub(super) struct Talk<'a> {
    pub(super) controller: SocketAddr,
    pub(super) sender: Arc<Sender>,
    pub(super) receiver: Receiver,
    pub(super) deadline: Instant,
    pub(super) limit: Duration,
    /// Until then it must have said something, if there are others to ask and it has not.
    pub(super) answer_by: Option<Instant>,
    /// How long it may say nothing after that.
    pub(super) silence: Option<Duration>,
    /// Called with what the rank waits for.
    pub(super) waiting: &'a mut dyn FnMut(&Waiting),
    /// The switch of this process, and what happens there, if it takes the place of one.
    pub(super) hosted: Option<(Arc<HostedSwitch>, mpsc::Receiver<SwitchEvent>)>,
}

impl Talk<'_> {
    /// The trees that the controller has planned. Starts the switch of this process if they need it.
    pub(super) fn trees<'a>(
        &mut self,
        config: &JoinConfig,
        devices: &'a [&'a Device],
        switches: Vec<IpAddr>,
        hosts: Option<HostsTrees>,
    ) -> Result<Trees<'a>, JoinError> {
        let (controller, count) = (self.controller, switches.len());
        let most = if hosts.is_some() { MAX_TREES } else { devices.len() };
        if count > most {
            let detail = format!("it has {count} trees, and there are at most {most}");
            return Err(JoinError::Protocol { controller, detail });
        }
        let Some(HostsTrees { reason, serves, addresses }) = hosts else {
            return Ok(Trees { switches, devices: &devices[..count], fallback: None });
        };
        let Some(devices) = devices.get(..addresses as usize).filter(|it| !it.is_empty()) else {
            let detail = format!("its trees use {addresses} of {} addresses", devices.len());
            return Err(JoinError::Protocol { controller, detail });
        };
        if !config.fallback {
            let detail = "it has this rank take the place of a switch, unasked".to_owned();
            return Err(JoinError::Protocol { controller, detail });
        }
        tracing::warn!(group = config.group, %reason, "no switch: the ranks take its place");
        if serves && self.hosted.is_none() {
            match HostedSwitch::start(&config.device) {
                Ok((switch, happened)) => self.hosted = Some((Arc::new(switch), happened)),
                Err(source) => {
                    let error = JoinError::Fallback { source };
                    self.send(&ToController::Fail {
                        reason: shortened(error.to_string()),
                        cause: None,
                    })?;
                    return Err(error);
                }
            }
        }
        let devices = &devices[..devices.len().min(count)];
        Ok(Trees { switches, devices, fallback: Some(shortened(reason)) })
    }

    pub(super) fn send(&self, message: &ToController) -> Result<(), JoinError> {
        let controller = self.controller;
        self.sender.send(message).map_err(|source| JoinError::Lost { controller, source })
    }

    pub(super) fn next(&mut self) -> Result<FromController, JoinError> {
        let controller = self.controller;
        loop {
            let until = self.deadline.min(Instant::now() + SILENCE);
            let until = self.answer_by.map_or(until, |by| until.min(by));
            let received = self.receiver.receive(until);
            if received.is_ok() {
                self.answer_by = self.silence.map(|silence| Instant::now() + silence);
            }
            match received {
                Ok(FromController::Ping) => self.send(&ToController::Pong)?,
                Ok(FromController::Waiting { awaited, left_ms }) => {
                    let left = Duration::from_millis(left_ms);
                    (self.waiting)(&Waiting { awaited: Some(awaited), refused: None, left });
                }
                Ok(FromController::Refused { reason }) => return Err(JoinError::Refused(reason)),
                Ok(message) => {
                    let Some((switch, _)) = &self.hosted else { return Ok(message) };
                    match switch.obey(message) {
                        Ok(Some(answer)) => self.send(&answer)?,
                        Ok(None) => {}
                        Err(message) => return Ok(*message),
                    }
                }
                Err(ReceiveError::TimedOut)
                    if self.answer_by.is_some_and(|by| Instant::now() >= by) =>
                {
                    let limit = self.silence.unwrap_or(ANSWER);
                    return Err(JoinError::Timeout { controller, limit });
                }
                Err(ReceiveError::TimedOut) if Instant::now() < self.deadline => {
                    let left = self.deadline.saturating_duration_since(Instant::now());
                    (self.waiting)(&Waiting { awaited: None, refused: None, left });
                }
                Err(error) => return Err(not_received(controller, self.limit, error)),
            }
        }
    }

    pub(super) fn unexpected(&self, message: &FromController) -> JoinError {
        let detail = format!("it sent {message:?} out of turn");
        JoinError::Protocol { controller: self.controller, detail }
    }
}

pub(super) fn not_received(
    controller: SocketAddr,
    limit: Duration,
    error: ReceiveError,
) -> JoinError {
    match error {
        ReceiveError::TimedOut => JoinError::Timeout { controller, limit },
        ReceiveError::Frame(error) => JoinError::frame(controller, &error),
        ReceiveError::Io(source) => match tls::reason(&source) {
            // Where it does not like our certificate, it says so after the handshake.
            Some(reason) => JoinError::Tls { controller, reason },
            None => JoinError::Lost { controller, source },
        },
        error @ ReceiveError::Term(_) => {
            JoinError::Protocol { controller, detail: error.to_string() }
        }
    }
}
