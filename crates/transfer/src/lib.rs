//! The transfer engine: segments, batches, tasks, slices and transports
