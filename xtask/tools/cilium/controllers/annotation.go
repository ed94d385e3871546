// Package controllers has the one constant that Cilium uses of sigs.k8s.io/mcs-api/controllers.
package controllers

// DerivedServiceAnnotation names the Service that stands for a ServiceImport.
const DerivedServiceAnnotation = "multicluster.kubernetes.io/derived-service"
