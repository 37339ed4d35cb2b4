//! The public RDMA API over interchangeable providers
