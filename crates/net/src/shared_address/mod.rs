//! Several devices on one address, of one process or of many.

mod descriptors;
mod table;
