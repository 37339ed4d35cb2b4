//! In-network collectives as pure state machines: slots, switch, host worker, controller
