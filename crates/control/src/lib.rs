//! The daemons of in-network collectives: controller and switch
