//! The host side of in-network collectives
