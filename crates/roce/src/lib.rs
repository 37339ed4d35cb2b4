//! The RoCEv2 reliable-connection endpoint as a pure state machine
