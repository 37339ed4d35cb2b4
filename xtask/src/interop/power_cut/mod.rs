//! What was COMPLETED and durable survives a reset of the target's machine.

#[expect(dead_code, reason = "its user comes next")]
mod disk;
