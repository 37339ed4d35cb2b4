//! Several devices on one address, of one process or of many.

mod admission;
mod descriptors;
mod steering;
mod table;
