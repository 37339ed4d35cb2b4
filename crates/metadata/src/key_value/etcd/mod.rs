//! `etcd://`: the values are keys of an etcd, over etcd's JSON gateway
//! (<https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/>).

mod message;
