//! Several devices on one address, of one process or of many.

mod admission;
mod descriptors;
mod hand_over;
mod steering;
mod table;
