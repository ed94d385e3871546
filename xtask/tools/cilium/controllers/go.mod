// Stands in for the module of this name, of which Cilium uses one constant.
module sigs.k8s.io/mcs-api/controllers

go 1.26.0
